"""The transfer benchmark compares every byte: small cases of it, between two processes over NIXL."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import anyio
import anyio.to_thread
import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.heavy]


@pytest.mark.parametrize(
    ("name", "descriptors", "staged"),
    [
        ("row_split", 4, 0.0),
        ("column_exact", 1024, 0.0),
        ("column_staged", 4, 1.0),
        ("column_packed", 2, 0.0),
    ],
)
async def test_bytes_arrive_by_every_way(name: str, descriptors: int, staged: float) -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("needs the nixl package")
    command = [sys.executable, "-m", "tests.bench", "transfer", "--json", "--mib", "32", "--rounds", "1"]
    with anyio.fail_after(120):
        done = await anyio.run_process([*command, "--cases", name], stderr=subprocess.DEVNULL)
    found = json.loads(done.stdout)["cases"][name]
    assert found["amplification"] == 1.0
    assert (found["descriptors"], found["staged_share"]) == (descriptors, staged)
    assert found["gib_s"] > 0
