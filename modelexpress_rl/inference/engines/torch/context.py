"""`TorchGeneratorContext`: which way a module takes its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference.adapter import GeneratorEngineAdapter
from modelexpress_rl.inference.engines.torch.by_capture import CaptureAdapter
from modelexpress_rl.inference.engines.torch.by_module import ModuleAdapter
from modelexpress_rl.inference.engines.torch.by_slices import PlainAdapter, SliceAdapter
from modelexpress_rl.inference.engines.torch.capture import Load
from modelexpress_rl.inference.engines.torch.mapping import TensorSlice


class TorchGeneratorContext:
    """Installs versions into `module`, in one of four ways.

    * `slices` say which box of which Hugging Face tensor lies where: fused, sharded, stacked
      or transposed parameters. Every parameter must be filled, each element once.
    * By capture (where the module has a `load_weights` and there are no `slices`): the module's own
      `load_weights(iterable of (name, tensor))` runs once, on a twin without memory, and what it copies is
      what this rank reads and installs. Every parameter must be filled. `load_weights=function` asks
      `function(module, iterable)` instead.
    * Plain (where there is none, or with `load_weights=False`): every parameter is the Hugging Face tensor
      of its own name, whole. A buffer is loaded where a tensor of its name is published. Of names that
      share one tensor (a tied head), one that is published is enough.
    * `load_weights_whole=True`: the module's own `load_weights` gets every published tensor, whole, at every
      install. For a `load_weights` that computes on what it loads, or decides by its values.

    Names in `frozen` are left as they are. `aliases` says under which other name a tensor may be
    published (`{"lm_head.weight": "model.embed_tokens.weight"}` for a head of its own that the trainer
    ties). Floating-point dtypes are cast as they are copied.

    Raises:
        UsageError: two ways are asked for, or the module can't take its weights that way.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        slices: Sequence[TensorSlice] | None = None,
        load_weights: bool | Load | None = None,
        load_weights_whole: bool = False,
        frozen: Collection[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        if slices is not None and (load_weights or load_weights_whole):
            raise UsageError("slices: they say what is loaded where; load_weights does not apply")
        if load_weights is False and load_weights_whole:
            raise UsageError("load_weights_whole: load_weights is False")
        if load_weights_whole and (frozen or aliases):
            raise UsageError("load_weights_whole: the module decides itself; frozen and aliases don't apply")
        self.load = load_weights if callable(load_weights) else None
        has_method = self.load is not None or callable(getattr(module, "load_weights", None))
        if (load_weights or load_weights_whole) and not has_method:
            raise UsageError(f"load_weights: {type(module).__name__} has no method of that name")
        self.module = module
        self.slices = None if slices is None else tuple(slices)
        self.load_weights = has_method and slices is None and load_weights is not False
        self.load_weights_whole = load_weights_whole
        self.frozen = frozenset(frozen)
        self.aliases = dict(aliases or {})

    def create_adapter(self) -> GeneratorEngineAdapter:
        """Make the adapter.

        Raises:
            UsageError: the slices do not fit the module.
        """
        if self.slices is not None:
            return SliceAdapter(self.module, self.slices, self.frozen, self.aliases)
        if self.load_weights_whole:
            return ModuleAdapter(self.module, self.load)
        if self.load_weights:
            return CaptureAdapter(self.module, self.load, self.frozen, self.aliases)
        return PlainAdapter(self.module, self.frozen, self.aliases)
