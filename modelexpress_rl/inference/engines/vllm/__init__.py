"""Installs versions into a vLLM engine, and vLLM's weight transfer backend `modelexpress-rl`.

Inside a worker: `ModelExpressGeneratorConfig(engine_context=VllmGeneratorContext(model, vllm_config))`.
From outside: `--weight-transfer-config '{"backend": "modelexpress-rl"}'`.
"""

from modelexpress_rl.inference.engines.vllm.context import VllmGeneratorContext

__all__ = ["VllmGeneratorContext"]
