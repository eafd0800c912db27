"""`HuggingFaceGeneratorContext`: a `transformers` model takes what a checkpoint of it would hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference.engines.huggingface.loading import load_checkpoint
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext


class HuggingFaceGeneratorContext(TorchGeneratorContext):
    """Installs versions into a `transformers` model, in place.

    Tensors are published under the names of a checkpoint, also where the model itself keeps them
    otherwise: renamed, or with all experts of a layer in one parameter. Which goes where is what
    `transformers` says for the model's class, captured once. A tied head needs one of its names.
    `load_weights_whole`, `frozen` and `aliases` are as in `TorchGeneratorContext`.

    Raises:
        UsageError: `model` is none of `transformers`, or is quantized by it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        load_weights_whole: bool = False,
        frozen: Collection[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        if not hasattr(model, "config") or not hasattr(model, "base_model_prefix"):
            raise UsageError(f"model: expected a model of transformers, got a {type(model).__name__}")
        if getattr(model, "hf_quantizer", None) is not None:
            raise UsageError(
                f"model: {type(model).__name__} is quantized by transformers: its parameters are computed, "
                f"not copied, from published tensors"
            )
        super().__init__(
            model,
            load_weights=load_checkpoint,
            load_weights_whole=load_weights_whole,
            frozen=frozen,
            aliases=aliases,
        )
