"""The one place where megatron-core is imported: lazily, quietly, and with a clear error."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from modelexpress_rl.errors import UsageError

# What megatron-core 0.16 says on import where its optional CUDA parts are missing, and what torch then
# says about megatron's use of it. Nothing else is silenced.
_EXPECTED = (
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"The following imports from `dynamic_context.py` will be removed",
    r"`torch\.jit\.script.*` is deprecated",
    r"Failed to find .*",
    r"pkg_resources is deprecated",
)


def import_megatron(module: str) -> Any:
    """Import `module` of megatron-core, without its warnings about parts that a CPU has no use for.

    Raises:
        UsageError: megatron-core isn't installed; the message says how to install it.
    """
    with quiet():
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "megatron":
                raise
            raise UsageError(
                f"{module} is needed and megatron-core isn't installed: "
                "pip install 'modelexpress-rl[megatron]'"
            ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back the warnings that megatron-core is known to give on a CPU, and only those."""
    with warnings.catch_warnings():
        for message in _EXPECTED:
            warnings.filterwarnings("ignore", message=message)
        yield
