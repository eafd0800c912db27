"""What the real ranks build; read by them and by the test."""

from __future__ import annotations

from typing import Any

import torch

SEED = 3
STEPS = 2
TOKENS = [[5, 1, 7, 30, 2, 2, 0, 9]]

_BASE: dict[str, Any] = {
    "hidden": 32, "layers": 2, "heads": 8, "kv_groups": 2, "ffn": 48, "vocab": 32, "seq": 8,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "grouped": _BASE,
    "one-kv-head": _BASE | {"kv_groups": 1, "layers": 1},
    "tied-bf16": _BASE | {"layers": 1, "tie": True, "dtype": torch.bfloat16},
}
MOE: dict[str, int] = {"hidden": 16, "heads": 4, "kv_groups": 2, "ffn": 12, "experts": 4}


def can_run(sizes: dict[str, Any]) -> bool:
    """With fewer KV heads than ranks Megatron's own forward asks for a CUDA device."""
    return bool(sizes["kv_groups"] >= 2)
