"""Installs versions into the model of an SGLang rank.

Where SGLang's model runner is: `ModelExpressGeneratorConfig(engine_context=SglangGeneratorContext(runner))`.
"""

from modelexpress_rl.inference.engines.sglang.context import SglangGeneratorContext

__all__ = ["SglangGeneratorContext"]
