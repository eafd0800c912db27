"""What the tests of a real vLLM on the CPU need."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.processes import serve
from tests.vllm.server import ENVIRONMENT

os.environ |= {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def control_plane(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A control plane, to which clients of this process and its children go."""
    with serve() as (_, address):
        monkeypatch.setenv("MODEL_EXPRESS_URL", address)
        yield address
