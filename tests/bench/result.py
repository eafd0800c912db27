"""What a benchmark hands back."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Result:
    """Figures by name (units in the names; some by kind), and what they were measured on."""

    title: str
    figures: Mapping[str, float | dict[str, float] | dict[str, dict[str, float]]]
    goals: dict[str, str] = field(default_factory=dict)
    conditions: str = field(default_factory=lambda: machine())


def machine() -> str:
    """The machine that the figures are of."""
    system = f"{os.cpu_count()} CPUs, {platform.machine()}, Linux {platform.release()}"
    return f"{system}, Python {platform.python_version()}"


def peak_bytes() -> int:
    """The most memory that was ever resident in this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def resident_bytes() -> int:
    """This process's resident memory now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
