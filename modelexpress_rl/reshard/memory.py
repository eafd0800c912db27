"""Tensors and arrays as the flat bytes that digests and arenas are made of; never a copy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard.geometry import Bytes


def as_bytes(tensor: Any, *, name: str = "tensor") -> Bytes:
    """View a contiguous torch tensor on the CPU, or a contiguous numpy array, as flat uint8.

    Raises:
        UsageError: it is not contiguous, or lies on another device; the message has `name`.
    """
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.c_contiguous:
            raise UsageError(f"{name}: expected a contiguous array, got strides {tensor.strides}")
        return tensor.reshape(-1).view(np.uint8)
    import torch

    if tensor.device.type != "cpu":
        raise UsageError(f"{name}: expected memory of the CPU, got {tensor.device}")
    if not tensor.is_contiguous():
        raise UsageError(f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")
    flat: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def bytes_at(addr: int, size_bytes: int) -> Bytes:
    """View this process's memory at an address; whoever owns it must outlive the view."""
    if size_bytes == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(addr))
