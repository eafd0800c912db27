"""`TorchGeneratorContext`: which way a module takes its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference.adapter import GeneratorEngineAdapter
from modelexpress_rl.inference.engines.torch.by_module import ModuleAdapter
from modelexpress_rl.inference.engines.torch.by_slices import PlainAdapter, SliceAdapter
from modelexpress_rl.inference.engines.torch.mapping import TensorSlice


class TorchGeneratorContext:
    """Installs versions into `module`, in one of three ways.

    * Plain (the default): every parameter is the Hugging Face tensor of its own name, whole. A buffer
      is loaded where a tensor of its name is published. Of names that share one tensor (a tied head),
      one that is published is enough.
    * `slices` say which box of which Hugging Face tensor lies where: fused, sharded, stacked
      or transposed parameters. Every parameter must be filled, each element once.
    * `load_weights=True`: the module's own `load_weights(iterable of (name, tensor))` gets every
      published tensor, whole.

    Names in `frozen` are left as they are. `aliases` says under which other name a tensor may be
    published (`{"lm_head.weight": "model.embed_tokens.weight"}` for a head of its own that the trainer
    ties). Floating-point dtypes are cast as they are copied.

    Raises:
        UsageError: both ways are asked for, or the module can't take its weights that way.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        slices: Sequence[TensorSlice] | None = None,
        load_weights: bool = False,
        frozen: Collection[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        if load_weights and (slices is not None or frozen or aliases):
            raise UsageError(
                "load_weights: the module decides itself; slices, frozen and aliases don't apply"
            )
        if load_weights and not callable(getattr(module, "load_weights", None)):
            raise UsageError(f"load_weights: {type(module).__name__} has no method of that name")
        self.module = module
        self.slices = None if slices is None else tuple(slices)
        self.load_weights = load_weights
        self.frozen = frozenset(frozen)
        self.aliases = dict(aliases or {})

    def create_adapter(self) -> GeneratorEngineAdapter:
        """Make the adapter.

        Raises:
            UsageError: the slices do not fit the module.
        """
        if self.load_weights:
            return ModuleAdapter(self.module)
        if self.slices is not None:
            return SliceAdapter(self.module, self.slices, self.frozen, self.aliases)
        return PlainAdapter(self.module, self.frozen, self.aliases)
