"""`VllmGeneratorContext`: the model of one vLLM worker as an engine that versions are installed into."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference.adapter import GeneratorEngineAdapter
from modelexpress_rl.inference.engines.torch.converting import Convert, converting


class VllmGeneratorContext:
    """Installs versions into `model`, the module of one vLLM worker, by its own `load_weights`, captured.

    A worker reads what its rank loads and nothing else. Parameters and buffers keep their addresses, and
    what vLLM derives from them after loading (packed, quantized, transposed) is derived anew. `vllm_config`
    is the worker's; `model_config` is the model's own where that is another, as for a draft model. Names in
    `frozen` are left as they are. `aliases` says under which other name a tensor may be published.

    `convert_native_to_hf` is for trainers that publish under their own names: it takes all published tensors
    and gives those of a checkpoint, by views, joins and renames. A trainer's context can do that, too.

    Raises:
        UsageError: `model` is no module with a `load_weights`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        convert_native_to_hf: Convert | None = None,
        *,
        model_config: Any = None,
        frozen: Collection[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        if not callable(getattr(model, "load_weights", None)):
            raise UsageError(f"model: {type(model).__name__} has no load_weights, as models of vLLM have")
        if not hasattr(vllm_config, "model_config"):
            raise UsageError(f"vllm_config: expected a VllmConfig, got a {type(vllm_config).__name__}")
        self.model = model
        self.vllm_config = vllm_config
        self.model_config = model_config or vllm_config.model_config
        self.convert_native_to_hf = convert_native_to_hf
        self.frozen = frozenset(frozen)
        self.aliases = dict(aliases or {})

    def create_adapter(self) -> GeneratorEngineAdapter:
        """Make the adapter.

        Raises:
            UsageError: this vLLM has no layerwise reload of a kind that is known here.
        """
        from modelexpress_rl.inference.engines.vllm.adapter import VllmAdapter

        return VllmAdapter(
            self.model,
            self.vllm_config,
            self.model_config,
            self.frozen,
            self.aliases,
            None if self.convert_native_to_hf is None else converting(self.convert_native_to_hf),
        )
