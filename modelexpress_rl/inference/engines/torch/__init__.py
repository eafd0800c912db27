"""Installs versions into any `torch.nn.Module`.

ModelExpressGeneratorConfig(engine_context=TorchGeneratorContext(model), model_name="llama")
"""

from modelexpress_rl.inference.engines.torch.context import TorchGeneratorContext
from modelexpress_rl.inference.engines.torch.mapping import TensorSlice

__all__ = ["TensorSlice", "TorchGeneratorContext"]
