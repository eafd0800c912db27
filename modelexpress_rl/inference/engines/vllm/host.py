"""What is asked of vLLM: its layerwise reload, by which a loaded model takes weights once more.

vLLM remembers each layer's tensors as they were before loading. A reload puts these in place, has them
filled, processes them as at the first load, copies the outcome into the tensors that the engine runs with,
and puts those back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from modelexpress_rl.errors import UsageError


class Reload:
    """The layerwise reload of one model; its methods are called in the order in which they stand here.

    Raises:
        UsageError: this vLLM has none of a kind that is known here, or runs compiled on a CPU.
    """

    def __init__(self, vllm_config: Any, model_config: Any) -> None:
        try:
            from vllm.config import set_current_vllm_config
            from vllm.model_executor.layers.attention import is_deferred_attention_layer
            from vllm.model_executor.model_loader.reload import layerwise, meta, sanitize
            from vllm.platforms import current_platform

            self._layerwise, self._meta = layerwise, meta
            self._initialize = layerwise.initialize_layerwise_reload
            self._finalize = layerwise.finalize_layerwise_reload
            self._process = layerwise._layerwise_process
            self._place = layerwise._place_kernel_tensors
            self._copy_and_place = layerwise._copy_and_restore_kernel_tensors
            self._is_attention = is_deferred_attention_layer
            self._info = layerwise.get_layerwise_info
            self._materialize = meta.materialize_layer
            self._skipped = frozenset(meta.SKIP_TENSORS)
            self._original_loader = layerwise._get_original_loader
            self._with_refs = sanitize.restore_layer_refs
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"vLLM 0.32 is known to work, this one has no layerwise reload like it: {error}"
            ) from error
        self._set_config = set_current_vllm_config
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._is_cpu = current_platform.is_cpu()
        if self._is_cpu and int(vllm_config.compilation_config.mode or 0):
            raise UsageError(
                "compiled code for a CPU may keep the packed weights that it was made with: "
                "start vLLM with enforce_eager=True (--enforce-eager)"
            )

    @contextmanager
    def configured(self) -> Iterator[None]:
        """Layers that are loaded or processed in here find the engine's configuration."""
        with self._set_config(self._vllm_config):
            yield

    def before_loading(self, layer: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """The layer's parameters and buffers as they were before loading, without memory.

        Those that vLLM leaves in place are not among them.
        """
        parameters, buffers = self._info(layer).restore_metadata
        return (
            {name: tensor for name, tensor in parameters.items() if name not in self._skipped},
            {name: tensor for name, tensor in buffers.items() if name not in self._skipped},
        )

    def leaves(self, name: str) -> bool:
        """Whether a reload leaves tensors of this name as the engine has them."""
        return name in self._skipped

    def is_attention(self, layer: torch.nn.Module) -> bool:
        """Whether it is an attention layer: its own parameters are scales, which a checkpoint may have."""
        return bool(self._is_attention(layer))

    def bound_to(self, tensor: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        """The tensor, its weight loader bound to `layer`.

        Where a reload has been, the loader is what vLLM wrapped it in: one that only counts and collects.
        """
        bound: torch.Tensor = self._with_refs(tensor, layer)
        original = self._original_loader(bound)
        if getattr(bound, "weight_loader", original) is not original:
            if isinstance(getattr(original, "__self__", None), type(layer)):
                original = MethodType(original.__func__, layer)
            bound.weight_loader = original  # type: ignore[attr-defined]
        return bound

    def begin(self, model: torch.nn.Module) -> None:
        """Put every layer's tensors as before loading in place of those that the engine runs with."""
        self._initialize(model)

    def fill(self, layer: torch.nn.Module) -> None:
        """Give a layer's tensors memory; what they hold there is to be written.

        Of what will not be written, the engine's values are kept.
        """
        info = self._info(layer)
        if self.is_attention(layer):
            self._place(layer, info)
            if (quantization := getattr(layer, "quant_method", None)) is not None:
                quantization.create_weights(layer)  # gone since the first load; marked as not written
            return
        self._materialize(layer, info)
        if info.kernel_tensors is None:
            return
        for held in info.kernel_tensors:
            for name, tensor in held.items():
                fresh = getattr(layer, name, None)
                if fresh is not None and fresh is not tensor and fresh.shape == tensor.shape:
                    fresh.data.copy_(tensor)

    def process(self, layer: torch.nn.Module) -> None:
        """Process a layer that was written, and bring the outcome to where the engine reads it."""
        quantization = getattr(layer, "quant_method", None)
        if self.is_attention(layer):
            if quantization is not None:
                quantization.process_weights_after_loading(layer)
            self._copy_and_place(layer, self._info(layer))
            return  # `end` has it derive the rest
        if self._is_cpu and getattr(quantization, "moe_kernel", None) is not None:
            # With a kernel there, vLLM copies the weights without packing them for the CPU.
            quantization.moe_kernel = None  # type: ignore[union-attr]
        self._process(layer, self._info(layer))

    def end(self, model: torch.nn.Module) -> None:
        """Put back what was not written, and derive what attention layers derive of other layers."""
        self._finalize(model, self._model_config)

    def give_up(self, model: torch.nn.Module) -> None:
        """After a failure: put the engine's tensors back wherever they are not, whatever they hold."""
        for layer in model.modules():
            info = self._info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                self._place(layer, info)
            info.reset()
