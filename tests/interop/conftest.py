"""The environment of 0.7.0, peers that run in it, and a control plane of ours."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from modelexpress_rl.server.app import Running, serving
from modelexpress_rl.server.stores.memory import MemoryStore
from tests.interop import make_venv
from tests.interop.peers import Peer, StartPeer, started


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that needs the environment of 0.7.0 may have to make it."""
    for item in items:
        if "interop_python" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(3 * make_venv.TIMEOUT_S))


@pytest.fixture(scope="session")
def interop_python() -> Path:
    """The Python of an environment with modelexpress 0.7.0."""
    try:
        return make_venv.make(make_venv.folder())
    except make_venv.CannotMake as error:
        pytest.skip(f"modelexpress {make_venv.VERSION} can't be installed here: {error}")


@pytest.fixture
def start_peer(interop_python: Path, tmp_path: Path) -> Iterator[StartPeer]:
    """`start_peer("peer_trainer.py", address, model, MX_SOMETHING="1")`."""
    with contextlib.ExitStack() as stack:

        def start(program: str, *arguments: str, **environment: str) -> Peer:
            return stack.enter_context(started(interop_python, tmp_path, program, *arguments, **environment))

        yield start


@pytest.fixture
async def plane() -> AsyncIterator[Running]:
    """A control plane in this process."""
    store = MemoryStore()
    async with serving(store) as running:
        yield running
    await store.close()
