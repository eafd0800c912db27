"""Tensors whose bytes, as they lie in memory, are their values: only such ones can be read from outside."""

from __future__ import annotations

from typing import Any

import numpy as np

from modelexpress_rl.errors import UsageError
from modelexpress_rl.transport.regions import DEVICE_KINDS


def require_plain_memory(name: str, tensor: Any) -> None:
    """Check a torch tensor or a numpy array that is to be published as `name`.

    Torch keeps conjugation and negation as a mark on unchanged memory, numpy a foreign byte order as a
    part of the dtype; neither mark is published.

    Raises:
        UsageError: its bytes are not its values, or it has no memory that a transport reads.
    """
    if isinstance(tensor, np.ndarray):
        if not tensor.dtype.isnative:
            raise UsageError(
                f"tensor {name!r}: has the byte order of another machine ({tensor.dtype.str}); "
                "publish tensor.astype(tensor.dtype.newbyteorder('='))"
            )
        return
    if tensor.is_conj() or tensor.is_neg():
        mark, method = ("conjugated", "resolve_conj") if tensor.is_conj() else ("negated", "resolve_neg")
        raise UsageError(
            f"tensor {name!r}: is marked as {mark}, its memory holds other values; publish tensor.{method}()"
        )
    if tensor.device.type not in DEVICE_KINDS:
        raise UsageError(
            f"tensor {name!r}: is on device {str(tensor.device)!r}, expected one of {', '.join(DEVICE_KINDS)}"
        )
    if tensor.numel() and not tensor.data_ptr():
        raise UsageError(
            f"tensor {name!r}: has no memory of its own ({type(tensor).__name__}); publish what it wraps"
        )
