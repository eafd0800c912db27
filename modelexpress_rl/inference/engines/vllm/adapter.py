"""Capture of a vLLM model's `load_weights`, and the install through vLLM's layerwise reload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from modelexpress_rl.errors import StateError
from modelexpress_rl.inference.adapter import PublishedTensor, StagedTensor
from modelexpress_rl.inference.engines.torch.by_capture import source_of, target_of
from modelexpress_rl.inference.engines.torch.capture import Captured, CapturedCopy, Load, capture
from modelexpress_rl.inference.engines.torch.dtypes import as_tensor
from modelexpress_rl.inference.engines.torch.mapping import Expected, writing
from modelexpress_rl.inference.engines.vllm.before_loading import BeforeLoading, before_loading
from modelexpress_rl.inference.engines.vllm.host import Reload
from modelexpress_rl.reshard.needs import Need


class VllmAdapter:
    """Runs `model.load_weights` once for each structure of published tensors, on a copy without memory."""

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        model_config: Any,
        frozen: frozenset[str],
        aliases: Mapping[str, str],
        load: Load | None = None,
    ) -> None:
        self._load = load
        self._model = model
        self._frozen = frozen
        self._aliases = aliases
        self._reload = Reload(vllm_config, model_config)

    def loader(self, published: Mapping[str, PublishedTensor]) -> VllmLoader:
        """See `GeneratorEngineAdapter.loader`."""
        with self._reload.configured():
            before = before_loading(self._model, self._reload)
            captured = capture(
                before.model,
                published,
                load=self._load,
                frozen=self._frozen,
                optional=before.optional,
                aliases=self._aliases,
            )
        return VllmLoader(self._model, self._reload, before, captured)


class VllmLoader:
    """Writes staged boxes into tensors as they were before loading, layer by layer, and has vLLM do the rest.

    At most one layer is held twice. An install that fails leaves every layer with the tensors that the
    engine runs with, of which some hold the new version.
    """

    def __init__(
        self, model: torch.nn.Module, reload: Reload, before: BeforeLoading, captured: Captured
    ) -> None:
        self.captured = captured
        self._model = model
        self._reload = reload
        self._copies: dict[str, dict[str, list[CapturedCopy]]] = {}
        for copy in captured.copies:
            name = copy.target.name
            for each in before.tied.get(name, (name,)):
                path, _, leaf = each.rpartition(".")
                self._copies.setdefault(path, {}).setdefault(leaf, []).append(copy)
        self._expected = {
            (path, leaf): Expected.of(getattr(before.model.get_submodule(path), leaf), strided=True)
            for path, leaves in self._copies.items()
            for leaf in leaves
        }

    @property
    def needs(self) -> Sequence[Need]:
        """See `WeightLoader.needs`."""
        return self.captured.needs

    def check(self, staged: Sequence[StagedTensor]) -> None:
        """See `WeightLoader.check`."""
        if [each.need for each in staged] != list(self.needs):
            raise StateError("the staged tensors are not those that this loader asked for")
        for path, leaves in self._copies.items():
            try:
                layer = self._model.get_submodule(path)
            except AttributeError as error:
                raise StateError(f"layer {path!r} is gone since the loader was made") from error
            parameters, buffers = self._reload.before_loading(layer)
            for leaf in leaves:
                tensor = (parameters | buffers).get(leaf, getattr(layer, leaf, None))
                expected = self._expected[path, leaf]
                if tensor is None or Expected.of(tensor, strided=True) != expected:
                    raise StateError(
                        f"tensor {leaf!r} of layer {path!r} was loaded as {expected} when the loader was "
                        f"made, now it is {None if tensor is None else Expected.of(tensor, strided=True)}"
                    )

    def install(self, staged: Sequence[StagedTensor]) -> None:
        """See `WeightLoader.install`."""
        boxes = [as_tensor(each).reshape(-1) for each in staged]
        with writing(self._model.parameters()), self._reload.configured():
            try:
                self._reload.begin(self._model)
                for path, leaves in self._copies.items():
                    layer = self._model.get_submodule(path)
                    self._reload.fill(layer)
                    self._write(layer, leaves, boxes)
                    self._reload.process(layer)
                self._reload.end(self._model)
            except BaseException:
                self._reload.give_up(self._model)
                raise

    def _write(
        self, layer: torch.nn.Module, leaves: Mapping[str, Sequence[CapturedCopy]], boxes: list[torch.Tensor]
    ) -> None:
        for leaf, copies in leaves.items():
            tensor = getattr(layer, leaf)
            for copy in copies:
                target, source = target_of(copy, tensor), source_of(copy, boxes)
                if not isinstance(source, torch.Tensor):
                    target.fill_(source)
                    continue
                for dtype in copy.casts:
                    source = source.to(dtype)
                target.copy_(source)
