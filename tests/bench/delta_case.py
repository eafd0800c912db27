"""What the benchmark of deltas encodes: bfloat16 weights before and after a step of an Adam-like optimiser.

The trainer keeps float32 masters; a weight changes where its master crosses a boundary of rounding. The
learning rate is the one that changes the wanted share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SHARES = {"changed 0.5 %": 0.005, "changed 2 %": 0.02, "changed 5 %": 0.05, "dense": 0.97}
TENSORS = 8
COLUMNS = 4096
Bits = npt.NDArray[np.uint16]
Master = npt.NDArray[np.float32]


def write(folder: Path, size_bytes: int) -> dict[str, float]:
    """Write `base.bin` and one file for each case; returns the share of elements that each changed."""
    noise = np.random.default_rng(0)
    master = noise.standard_normal(size_bytes // 2, dtype=np.float32) * np.float32(0.02)
    update = _update(noise, master.size)
    base = rounded(master)
    base.tofile(folder / "base.bin")
    shares = {}
    for name, share in SHARES.items():
        new = rounded(master + update * _rate(master, update, share))
        new.tofile(folder / f"{name}.bin")
        shares[name] = float(np.mean(base != new))
    return shares


def write_chain(folder: Path, size_bytes: int, length: int, share: float) -> None:
    """Write `0.bin` and the versions that follow it."""
    noise = np.random.default_rng(1)
    master = noise.standard_normal(size_bytes // 2, dtype=np.float32) * np.float32(0.02)
    rate = _rate(master, _update(noise, master.size), share)
    for number in range(length + 1):
        rounded(master).tofile(folder / f"{number}.bin")
        master += _update(noise, master.size) * rate


def rounded(values: Master) -> Bits:
    """To the nearest bfloat16, ties to even, as its bits."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _update(noise: np.random.Generator, size: int) -> Master:
    """First moments over roots of second moments: about normal, and bounded."""
    update: Any = np.clip(noise.standard_normal(size, dtype=np.float32), -3, 3)
    return update


def _rate(master: Master, update: Master, share: float) -> np.float32:
    """The learning rate that changes that share, by bisection over a sample."""
    sample, of_it = master[: 1 << 20], update[: 1 << 20]
    base = rounded(sample)
    low, high = -24.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if np.mean(base != rounded(sample + of_it * np.float32(2.0**middle))) < share:
            low = middle
        else:
            high = middle
    return np.float32(2.0**high)
