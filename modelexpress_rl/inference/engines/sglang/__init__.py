"""Installs versions into the model of an SGLang rank.

Where SGLang's model runner is: `ModelExpressGeneratorConfig(engine_context=SglangGeneratorContext(runner))`.
"""

from typing import TYPE_CHECKING, Any

from modelexpress_rl.inference.engines.sglang.context import SglangGeneratorContext

if TYPE_CHECKING:
    from modelexpress_rl.inference.engines.sglang.update import update_all_ranks as update_all_ranks

__all__ = ["SglangGeneratorContext", "update_all_ranks"]


def __getattr__(name: str) -> Any:
    if name != "update_all_ranks":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from modelexpress_rl.inference.engines.sglang import update

    return update.update_all_ranks
