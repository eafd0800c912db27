"""Loads versions into an SGLang model: captured copies or whole tensors, within SGLang's own steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference.adapter import (
    GeneratorEngineAdapter,
    PublishedTensor,
    StagedTensor,
    WeightLoader,
)
from modelexpress_rl.inference.engines.sglang.host import Host, load_only
from modelexpress_rl.inference.engines.torch.by_capture import CaptureAdapter
from modelexpress_rl.inference.engines.torch.by_module import ModuleAdapter
from modelexpress_rl.inference.engines.torch.mapping import writing
from modelexpress_rl.reshard.needs import Need


class SglangAdapter:
    """Chooses how a model is loaded, once."""

    def __init__(
        self, model_runner: Any, whole: bool, frozen: frozenset[str], aliases: Mapping[str, str]
    ) -> None:
        self._host = Host(model_runner)
        self._whole = whole or self._host.is_quantized
        if self._whole and (frozen or aliases):
            raise UsageError(
                "frozen, aliases: the model is loaded by whole tensors (it is quantized, or "
                "load_weights_whole is set), so that its load_weights decides itself"
            )
        self._inner: GeneratorEngineAdapter = (
            ModuleAdapter(self._host.model, self._host.load)
            if self._whole
            else CaptureAdapter(self._host.model, load_only, frozen, aliases)
        )

    def loader(self, published: Mapping[str, PublishedTensor]) -> SglangLoader:
        """See `GeneratorEngineAdapter.loader`."""
        self._host.require_updatable()
        return SglangLoader(self._host, self._inner.loader(published), derives=not self._whole)


class SglangLoader:
    """One structure of published tensors. An install that fails leaves parameters as SGLang runs them."""

    def __init__(self, host: Host, inner: WeightLoader, derives: bool) -> None:
        self._host = host
        self._inner = inner
        self._derives = derives

    @property
    def needs(self) -> Sequence[Need]:
        """See `WeightLoader.needs`."""
        return self._inner.needs

    def check(self, staged: Sequence[StagedTensor]) -> None:
        """See `WeightLoader.check`."""
        self._host.require_updatable()
        self._inner.check(staged)

    def install(self, staged: Sequence[StagedTensor]) -> None:
        """See `WeightLoader.install`."""
        with writing(self._host.model.parameters()):
            self._host.restore()
            try:
                self._inner.install(staged)
                if self._derives:
                    self._host.derive()
            finally:
                self._host.process()
