"""Versions out of a stream of whole tensors, and streams of whole tensors out of versions.

Some frameworks gather their weights themselves and hand them over one by one, each gone with the next.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias

import torch

from modelexpress_rl.blocking import Portal
from modelexpress_rl.errors import EngineUncertain, IncompleteVersionError, StateError, UsageError
from modelexpress_rl.inference.adapter import PublishedTensor, StagedTensor
from modelexpress_rl.inference.async_client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.inference.engines.torch.dtypes import as_tensor
from modelexpress_rl.reshard.needs import Need
from modelexpress_rl.train.client import BlockingStagedShard, ModelExpressTrainerClient
from modelexpress_rl.train.config import ModelExpressTrainerConfig, TrainerStagingMode
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from modelexpress_rl.version import WeightVersionRef

NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]]
REUSE_TIMEOUT_S = 300.0
COUNT = "modelexpress_rl.tensors_in_the_stream_of:"
"""Begins the name of a tensor that says how many a publisher's stream had, its own and the others'."""


class StreamPublisher:
    """Publishes what a stream yields, from copies in host memory: one, as big as what is kept.

    `keeps(index, name)` says which tensors of the stream this rank publishes; all of them by default. With
    `counts` it also publishes how many there were, so that a `StreamReceiver` notices where the ranks of a
    trainer were handed different streams. Every stream must yield the same names, shapes and dtypes in the
    same order, as the first did. Blocking; the methods may be called from any thread, one at a time.
    """

    def __init__(
        self,
        model_name: str | None,
        slot_id: str,
        *,
        server_url: str | None = None,
        keeps: Callable[[int, str], bool] = lambda _index, _name: True,
        counts: bool = False,
        reuse_timeout_s: float = REUSE_TIMEOUT_S,
    ) -> None:
        self.slot_id = slot_id
        self._keeps = keeps
        self._counts = counts
        self._reuse_timeout_s = reuse_timeout_s
        self._held: dict[str, torch.Tensor] = {}
        self._bound = self._copied = False
        self._staged: BlockingStagedShard | None = None
        self._lent: list[BlockingStagedShard] = []
        self._client = ModelExpressTrainerClient.initialize(
            ModelExpressTrainerConfig(
                model_name=model_name,
                server_url=server_url,
                device_id=None if "LOCAL_RANK" in os.environ else 0,
                staging_mode=TrainerStagingMode.IN_PLACE,
                engine_context=PlainTrainerContext(slot_id=slot_id),
            )
        )

    def copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the next version's tensors, all of them; waits until nobody reads the last one's.

        Raises:
            UsageError: they are others than before.
            DeadlineExceeded, FenceBroken: the last version is still being read, or that can't be known.
        """
        with self._copying() as take:
            for name, tensor in tensors:
                take(name, tensor)

    async def copy_async(self, tensors: NamedTensors) -> None:
        """As `copy`, also of a stream that is asynchronous; it is advanced in the caller's own thread."""
        if not isinstance(tensors, AsyncIterable):
            self.copy(tensors)
            return
        with self._copying() as take:
            async for name, tensor in tensors:
                take(name, tensor)

    @contextmanager
    def _copying(self) -> Iterator[Callable[[str, torch.Tensor], None]]:
        while self._lent:
            self._lent[-1].release().wait(self._reuse_timeout_s)
            self._lent.pop()
        self._staged = None
        self._copied = False
        seen: set[str] = set()
        index = -1

        def take(name: str, tensor: torch.Tensor) -> None:
            nonlocal index
            index += 1
            if not self._keeps(index, name):
                return
            if name in seen:
                raise UsageError(f"tensor {name!r}: comes twice")
            seen.add(name)
            self._buffer(name, tensor).copy_(tensor.detach())

        yield take
        if self._counts:
            seen.add(COUNT + self.slot_id)
            self._buffer(COUNT + self.slot_id, torch.tensor(index + 1)).fill_(index + 1)
        missing = [name for name in self._held if name not in seen]
        if missing:
            raise UsageError(f"tensor {missing[0]!r}: came before, and is missing ({len(missing)} are)")
        self._copied = True

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        held = self._held.get(name)
        if held is None:
            if self._bound:
                raise UsageError(f"tensor {name!r}: did not come before")
            held = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._held[name] = held
        if (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            raise UsageError(
                f"tensor {name!r}: was {held.dtype} {tuple(held.shape)} before, "
                f"is {tensor.dtype} {tuple(tensor.shape)}"
            )
        return held

    def publish(self, version_id: str) -> None:
        """Publish what was copied as a version that exists.

        Raises:
            StateError: nothing was copied since the last version.
            RpcError: the control plane refuses it.
        """
        if self._staged is not None or not self._copied:
            raise StateError(f"version {version_id}: no tensors were copied for it")
        if not self._bound:
            self._client.bind_tensors(self._held)
            self._bound = True
        staged = self._client.stage_shard(WeightVersionRef(version_id))
        self._lent.append(staged)  # also where it is not known whether it was announced: it may be read
        staged.publish()
        self._staged = staged

    def release(self) -> None:
        """The version is not needed any more; the memory is waited for where it is next written."""
        if self._staged is not None:
            self._staged.release()

    @property
    def model_name(self) -> str:
        """The model, as the control plane knows it."""
        return self._client.model_name

    def pop_metrics(self) -> dict[str, float]:
        """The numbers of the last publication, once."""
        return self._client.pop_metrics()

    def close(self) -> None:
        """Leave the control plane; idempotent."""
        self._client.close()


class _Elsewhere:
    """The context and the adapter of an engine that is elsewhere: whoever takes the stream loads it."""

    def __init__(self) -> None:
        self.staged: Sequence[StagedTensor] = ()

    def create_adapter(self) -> _Elsewhere:
        return self

    def loader(self, published: Mapping[str, PublishedTensor]) -> _WholeTensors:
        return _WholeTensors(self, published)


class _WholeTensors:
    """A loader that takes every published tensor whole, as it is staged."""

    def __init__(self, engine: _Elsewhere, published: Mapping[str, PublishedTensor]) -> None:
        self.needs = tuple(
            Need(name, tensor.dtype, (0,) * len(tensor.shape), tensor.shape)
            for name, tensor in published.items()
        )
        self._engine = engine

    def check(self, staged: Sequence[StagedTensor]) -> None:
        if [each.need for each in staged] != list(self.needs):
            raise StateError("the staged tensors are not those that this loader asked for")
        counts = {each.need.name: int(as_tensor(each)) for each in staged if _is_count(each)}
        for name, count in counts.items():
            if count != len(staged) - len(counts):
                raise IncompleteVersionError(
                    f"{len(staged) - len(counts)} tensors are published, but the stream of "
                    f"{name.removeprefix(COUNT)!r} had {count}: the trainer's ranks were handed others"
                )

    def install(self, staged: Sequence[StagedTensor]) -> None:
        self._engine.staged = [each for each in staged if not _is_count(each)]


def _is_count(staged: StagedTensor) -> bool:
    return staged.need.name.startswith(COUNT)


class StreamReceiver:
    """Receives versions as streams of whole tensors in host memory, verified before the first comes."""

    def __init__(self, model_name: str | None, *, server_url: str | None = None) -> None:
        self._engine = _Elsewhere()
        self._portal = Portal("tensor stream")
        config = ModelExpressGeneratorConfig(
            engine_context=self._engine, model_name=model_name, server_url=server_url
        )
        try:
            self._client = self._portal.call(AsyncModelExpressGeneratorClient.initialize, config)
        except BaseException:
            self._portal.close()
            raise

    def receive(self, version_id: str) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Every tensor of a READY version, each valid until the stream ends or is closed.

        The first one comes when all have arrived and are verified. A version whose stream was left before
        its end is received anew where it is asked for again.

        Raises:
            StateError: it was the last one to be received, to its end.
            IncompleteVersionError: the ranks of the trainer were handed different streams.
            RpcError, PeerError, TryAgainError: as `stage_weight`; nothing has come then.
        """
        staged = self._portal.call(self._client.stage_weight, version_id)
        try:
            job = self._portal.call(self._client.begin_install, staged)
        except BaseException:
            self._portal.call(staged.release)
            raise
        if job is None:
            raise StateError(f"version {version_id}: was received already")
        failure: Exception | None = StateError(f"the stream of version {version_id} was left early")
        try:
            job.write()
            for each in self._engine.staged:
                yield each.need.name, as_tensor(each)
            failure = None
        finally:
            self._engine.staged = ()
            with suppress(EngineUncertain):  # that is what `failure` says
                self._portal.call(self._client.end_install, staged, failure)

    def close(self) -> None:
        """Leave the control plane; idempotent."""
        if not self._portal.closed:
            try:
                self._portal.call(self._client.close)
            finally:
                self._portal.close()
