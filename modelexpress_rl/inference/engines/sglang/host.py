"""What is asked of SGLang: the steps around `load_weights` in its own updates of a model that runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from modelexpress_rl.errors import UsageError


class Host:
    """SGLang's side of one model; `restore`, a load and `process` make one update, in this order.

    Raises:
        UsageError: this SGLang has no loader of a kind that is known here.
    """

    def __init__(self, model_runner: Any) -> None:
        try:
            from sglang.srt.model_loader.loader import DefaultModelLoader
        except ImportError as error:
            raise UsageError(f"sglang: expected it to be importable: {error}") from error
        if not hasattr(DefaultModelLoader, "load_weights_and_postprocess"):
            raise UsageError("sglang: 0.5 is known to work, the loader of this one can't load once more")
        self._loader = DefaultModelLoader
        self._runner = model_runner
        self._device = torch.device(model_runner.device)
        self.model: torch.nn.Module = model_runner.model

    @property
    def is_quantized(self) -> bool:
        """Whether parameters hold other values than a checkpoint's tensors."""
        configured = getattr(getattr(self._runner, "model_config", None), "quantization", None)
        return configured is not None or getattr(self.model, "quant_config", None) is not None

    def require_updatable(self) -> None:
        """Check that weights written in place are those that the model then computes with.

        Raises:
            UsageError: SGLang keeps derived values, shares the weights, or has packed them for good.
        """
        for name, layer in self.model.named_modules():
            reason = getattr(layer, "_derived_weight_cache_error", None)
            if reason is not None:
                raise UsageError(f"layer {name!r} of {type(self.model).__name__} can't be updated: {reason}")
            if getattr(layer, "use_intel_amx_backend", False):
                raise UsageError(f"layer {name!r} of {type(self.model).__name__} is packed for AMX for good")
        require_own = getattr(
            getattr(self._runner, "weight_updater", None), "_assert_weight_cache_inactive", None
        )
        if require_own is not None:
            try:
                require_own("a refit")
            except RuntimeError as error:
                raise UsageError(f"the model can't be updated: {error}") from error

    def restore(self) -> None:
        """Bring parameters that were packed after loading back to how `load_weights` fills them."""
        undo = getattr(self._loader, "restore_weights_before_loading", None)
        if undo is not None:
            undo(self.model, self._device)

    def load(self, model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> Any:
        """Load as SGLang does, up to what `process` does."""
        only = getattr(self._loader, "load_weights_only", None)
        if only is None:
            return model.load_weights(weights)
        return only(model, weights, self._device)

    def derive(self) -> None:
        """What `load_weights` derives at its end, for weights that came another way."""
        derive = getattr(self.model, "post_load_weights", None)
        if derive is not None:
            derive()

    def process(self) -> None:
        """Process parameters as after loading: pack, quantize, transpose."""
        process = getattr(self._loader, "postprocess_weights", None)
        if process is not None:
            process(self.model, self._device)
        else:  # loading nothing at all, and then processing, is how an older one is asked for it
            self._loader.load_weights_and_postprocess(self.model, iter(()), self._device)


def load_only(model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> Any:
    """The model's `load_weights`, without what it derives at its end: for a capture, on a twin."""
    if hasattr(model, "post_load_weights"):
        model.post_load_weights = lambda *_args, **_options: None
    return model.load_weights(weights)
