"""Streams of whole tensors: what a publisher refuses, and what a receiver does when it is left early."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from modelexpress_rl import ModelExpressControlClient, WeightPayloadFormat
from modelexpress_rl.errors import IncompleteVersionError, StateError, Unavailable, UsageError
from modelexpress_rl.frameworks.tensor_stream import StreamPublisher, StreamReceiver
from tests.frameworks.conftest import Framework

pytestmark = pytest.mark.heavy
MODEL, SLOT = "stream/policy", "stream:0"


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(12.0).reshape(3, 4) + 100 * step,
        "half": (torch.arange(6) + step).bfloat16(),
        "count": torch.tensor(step),
        "none": torch.zeros(0, 4),
    }


class Stream:
    """A publisher, a receiver, and who creates versions."""

    def __init__(self, server_url: str) -> None:
        self.control_url = server_url
        self.publisher = StreamPublisher(MODEL, SLOT, server_url=server_url, reuse_timeout_s=30.0)
        self.receiver = StreamReceiver(MODEL, server_url=server_url)
        self.control = ModelExpressControlClient.connect(server_url)

    def create(self, name: str) -> str:
        self.control.create_weight_version(
            MODEL, name, WeightPayloadFormat.FULL_TENSOR, [SLOT], uid=f"stream:{name}"
        )
        return f"stream:{name}"

    def received(self, version_id: str) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.receiver.receive(version_id)}

    def publish(self, name: str, published: dict[str, torch.Tensor]) -> str:
        version = self.create(name)
        self.publisher.copy(published.items())
        self.publisher.publish(version)
        return version


@pytest.fixture
def stream(framework: Framework) -> Iterator[Stream]:
    made = Stream(framework.server_url)
    with contextlib.ExitStack() as stack:
        for each in (made.control, made.receiver, made.publisher):
            stack.callback(each.close)
        yield made


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_versions_come_whole_also_after_one_was_left_early(stream: Stream) -> None:
    async def one_by_one(named: dict[str, torch.Tensor]) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for each in named.items():
            await asyncio.sleep(0)
            yield each

    for step in (1, 2):
        version = stream.create(f"whole-{step}")
        if step == 1:
            stream.publisher.copy(tensors(step).items())
        else:
            asyncio.run(stream.publisher.copy_async(one_by_one(tensors(step))))
        stream.publisher.publish(version)
        if step == 2:
            left = stream.receiver.receive(version)
            next(left)
            left.close()
        assert_same(stream.received(version), tensors(step))
        with pytest.raises(StateError, match=f"version {version}: was received already"):
            next(stream.receiver.receive(version))
        stream.control.delete_weight_version(version)
    assert stream.publisher.pop_metrics()["trainer_refit_e2e_s"] > 0


def test_another_stream_than_before_is_refused_by_name(stream: Stream) -> None:
    publisher = stream.publisher
    with pytest.raises(StateError, match="version stream:x: no tensors were copied for it"):
        publisher.publish("stream:x")
    publisher.copy(tensors(1).items())
    publisher.publish(stream.create("refused"))
    stream.control.delete_weight_version("stream:refused")
    cases: list[tuple[Any, str]] = [
        ([*tensors(2).items(), ("more", torch.ones(1))], "tensor 'more': did not come before"),
        (list(tensors(2).items())[1:], r"tensor 'weight': came before, and is missing \(1 are\)"),
        ([*tensors(2).items(), ("weight", torch.ones(3, 4))], "tensor 'weight': comes twice"),
        (
            (tensors(2) | {"weight": torch.ones(4, 3)}).items(),
            r"tensor 'weight': was torch.float32 \(3, 4\) before, is torch.float32 \(4, 3\)",
        ),
    ]
    for named, problem in cases:
        with pytest.raises(UsageError, match=problem):
            publisher.copy(named)
        with pytest.raises(StateError, match="no tensors were copied"):
            publisher.publish("stream:x")
    version = stream.create("after")
    publisher.copy(tensors(3).items())
    publisher.publish(version)
    assert_same(stream.received(version), tensors(3))
    stream.control.delete_weight_version(version)
    publisher.release()


def test_memory_is_waited_for_where_nobody_knows_whether_it_was_announced(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = stream.publisher
    stage, staged = publisher._client.stage_shard, []

    class Unsure:
        """Announces the version, and loses the reply."""

        def __init__(self, version: Any) -> None:
            self.real = stage(version)
            self.release = self.real.release
            staged.append(self.real)

        def publish(self) -> None:
            self.real.publish()
            raise Unavailable("the reply was lost")

    publisher.copy(tensors(1).items())
    version = stream.create("unsure")
    with monkeypatch.context() as patch:
        patch.setattr(publisher._client, "stage_shard", Unsure)
        with pytest.raises(Unavailable):
            publisher.publish(version)
    assert_same(stream.received(version), tensors(1))
    assert not staged[0].source_reuse_ready.done
    stream.control.delete_weight_version(version)
    publisher.copy(tensors(2).items())
    assert staged[0].source_reuse_ready.done


def test_a_structure_that_comes_back_is_received_as_itself(stream: Stream) -> None:
    other = StreamPublisher(MODEL, "stream:other", server_url=stream.control_url)
    try:
        for step in (1, 2):
            assert_same(stream.received(stream.publish(f"own-{step}", tensors(step))), tensors(step))
            stream.control.delete_weight_version(f"stream:own-{step}")
            version = f"stream:other-{step}"
            stream.control.create_weight_version(
                MODEL, version, WeightPayloadFormat.FULL_TENSOR, ["stream:other"], uid=version
            )
            other.copy([("alone", torch.full((2,), float(step)))])
            other.publish(version)
            assert_same(stream.received(version), {"alone": torch.full((2,), float(step))})
            stream.control.delete_weight_version(version)
    finally:
        other.close()


def test_ranks_that_share_a_stream_make_it_whole(framework: Framework) -> None:
    slots = ["counting:0", "counting:1"]
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(ModelExpressControlClient.connect(framework.server_url))
        receiver = StreamReceiver(MODEL, server_url=framework.server_url)
        stack.callback(receiver.close)
        publishers = []
        for rank, slot in enumerate(slots):

            def keeps(index: int, _name: str, rank: int = rank) -> bool:
                return index % 2 == rank

            made = StreamPublisher(MODEL, slot, server_url=framework.server_url, keeps=keeps, counts=True)
            stack.callback(made.close)
            publishers.append(made)

        def published(name: str, *streams: dict[str, torch.Tensor]) -> str:
            version = f"counting:{name}"
            control.create_weight_version(MODEL, version, WeightPayloadFormat.FULL_TENSOR, slots, uid=version)
            for publisher, named in zip(publishers, streams, strict=True):
                publisher.copy(named.items())
                publisher.publish(version)
            return version

        whole = published("whole", tensors(1), tensors(1))
        assert_same({name: tensor.clone() for name, tensor in receiver.receive(whole)}, tensors(1))
        control.delete_weight_version(whole)


def test_a_rank_that_was_handed_nothing_is_noticed(framework: Framework) -> None:
    slots = ["nothing:0", "nothing:1"]
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(ModelExpressControlClient.connect(framework.server_url))
        receiver = StreamReceiver(MODEL, server_url=framework.server_url)
        stack.callback(receiver.close)
        version = "nothing:1"
        control.create_weight_version(MODEL, version, WeightPayloadFormat.FULL_TENSOR, slots, uid=version)
        for rank, (slot, named) in enumerate(zip(slots, (tensors(1), {}), strict=True)):
            publisher = StreamPublisher(
                MODEL,
                slot,
                server_url=framework.server_url,
                keeps=lambda index, _name, rank=rank: index % 2 == rank,  # type: ignore[misc]
                counts=True,
            )
            stack.callback(publisher.close)
            publisher.copy(named.items())
            publisher.publish(version)
        for _ in range(2):
            with pytest.raises(
                IncompleteVersionError,
                match=r"2 tensors are published, but the stream of 'nothing:[01]' had [04]: the trainer's",
            ):
                next(receiver.receive(version))
        control.delete_weight_version(version)
