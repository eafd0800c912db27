"""The one place where megatron-core is imported: lazily, quietly, and with a clear error."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from modelexpress_rl.errors import UsageError


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
    """Hold back what megatron-core and torch say of themselves while megatron is imported or built.

    Megatron-core 0.16 warns on import of missing CUDA parts, of its own deprecated modules and of torch
    functions that it still uses: nothing that a user of ours can act on. Other modules' warnings pass.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
        yield
