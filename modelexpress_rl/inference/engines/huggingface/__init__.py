"""Installs versions into a model of Hugging Face `transformers`.

ModelExpressGeneratorConfig(engine_context=HuggingFaceGeneratorContext(model), model_name="qwen3")
"""

from modelexpress_rl.inference.engines.huggingface.context import HuggingFaceGeneratorContext

__all__ = ["HuggingFaceGeneratorContext"]
