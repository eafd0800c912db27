"""Published dtypes as torch's own, and staged bytes as tensors."""

from __future__ import annotations

import torch

from modelexpress_rl.errors import GeometryError
from modelexpress_rl.inference.adapter import StagedTensor


def torch_dtype(name: str, *, tensor: str) -> torch.dtype:
    """The dtype that is written "torch.bfloat16".

    Raises:
        GeometryError: this torch has no such dtype.
    """
    prefix, _, short = name.partition(".")
    dtype = getattr(torch, short, None) if prefix == "torch" else None
    if not isinstance(dtype, torch.dtype):
        raise GeometryError(f"tensor {tensor!r}: published as {name!r}, which this torch does not know")
    return dtype


def require_castable(published: str, target: torch.dtype, *, tensor: str, parameter: str) -> None:
    """Check that copying `published` into `target` keeps the meaning: the same, or float to float.

    Raises:
        GeometryError: it would turn one kind of number into another.
    """
    source = torch_dtype(published, tensor=tensor)
    if source != target and not (source.is_floating_point and target.is_floating_point):
        raise GeometryError(
            f"tensor {tensor!r}: published as {source}, but parameter {parameter!r} is {target}; "
            f"only floating-point dtypes are cast into one another"
        )


def as_tensor(staged: StagedTensor) -> torch.Tensor:
    """The staged bytes as a tensor of the published dtype: a view, nothing is copied."""
    dtype = torch_dtype(staged.need.dtype, tensor=staged.need.name)
    if not staged.data.size:
        return torch.empty(staged.need.shape, dtype=dtype)
    return torch.from_numpy(staged.data).view(dtype).view(staged.need.shape)
