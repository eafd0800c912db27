"""What the tests of a real vLLM on the CPU need."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.processes import serve

# Before vLLM is imported. Processes are started anew: a fork would take our threads' locks with it.
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "MX_WORKER_HOST": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def control_plane(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A control plane, to which clients of this process and its children go."""
    with serve() as (_, address):
        monkeypatch.setenv("MODEL_EXPRESS_URL", address)
        yield address
