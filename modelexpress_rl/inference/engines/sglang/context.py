"""`SglangGeneratorContext`: the model of one SGLang rank as an engine that versions are installed into."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference.adapter import GeneratorEngineAdapter


class SglangGeneratorContext:
    """Installs versions into `model_runner.model`, the module of one SGLang rank.

    A rank reads what its own `load_weights` takes, captured once, and nothing else. A model whose weights
    SGLang quantizes or keeps quantized reads whole tensors, for `load_weights` itself, as with
    `load_weights_whole=True`. Around both SGLang undoes its packing, and packs and derives anew.

    `apply_weight` belongs between two batches, in the thread of SGLang's scheduler, with generation paused;
    the radix cache is then the caller's to flush. Names in `frozen` are left as they are. `aliases` says
    under which other name a tensor may be published; neither applies to whole tensors.

    Raises:
        UsageError: `model_runner` holds no model with a `load_weights`, or has no device.
    """

    def __init__(
        self,
        model_runner: Any,
        *,
        load_weights_whole: bool = False,
        frozen: Collection[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        model = getattr(model_runner, "model", None)
        if not callable(getattr(model, "load_weights", None)):
            raise UsageError(
                f"model_runner: expected SGLang's ModelRunner with its model loaded, "
                f"got a {type(model_runner).__name__} whose model is a {type(model).__name__}"
            )
        if not hasattr(model_runner, "device"):
            raise UsageError(f"model_runner: a {type(model_runner).__name__} has no device")
        self.model_runner = model_runner
        self.load_weights_whole = load_weights_whole
        self.frozen = frozenset(frozen)
        self.aliases = dict(aliases or {})

    def create_adapter(self) -> GeneratorEngineAdapter:
        """Make the adapter.

        Raises:
            UsageError: this SGLang has no loader of a kind that is known here, or `frozen` or `aliases` are
                given for a model that is loaded by whole tensors.
        """
        from modelexpress_rl.inference.engines.sglang.adapter import SglangAdapter

        return SglangAdapter(self.model_runner, self.load_weights_whole, self.frozen, self.aliases)
