"""One control plane and one pair of trainer processes, for all tests of this folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.processes import serve
from tests.frameworks.actors import Actors, actors

RANKS = 2
RETENTION = "2s"


@dataclass(frozen=True)
class Framework:
    """Where everything is."""

    folder: Path
    server_url: str
    trainers: Actors


@pytest.fixture(scope="session")
def framework(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Framework]:
    """A control plane as a process of its own, and the trainers; NIXL and gloo as they are."""
    for needed in ("nixl", "transformers", "megatron"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} isn't installed")
    folder = tmp_path_factory.mktemp("frameworks")
    with (
        serve("memory", 0, "--retention", RETENTION) as (_, server_url),
        actors(folder, RANKS, str(folder), server_url) as trainers,
    ):
        yield Framework(folder, server_url, trainers)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
