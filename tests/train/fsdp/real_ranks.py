"""Processes of `real_rank.py`, started as a launcher starts them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.processes import Running, running

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def ranks(count: int, *arguments: str) -> Iterator[list[Running]]:
    """So many real ranks; all end with the block."""
    command = [sys.executable, "-m", "tests.train.fsdp.real_rank", *arguments]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                running(
                    command,
                    {"RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"},
                    cwd=str(ROOT),
                )
            )
            for rank in range(count)
        ]
