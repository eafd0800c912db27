"""The environment of 0.7.0, peers that run in it, and a control plane of ours."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from modelexpress_rl.server.app import Running, serving
from modelexpress_rl.server.stores.memory import MemoryStore
from tests.interop import make_venv
from tests.interop.peers import Pool, started


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


@pytest.fixture(scope="package")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pool's peers look for a token; empty at first."""
    path = tmp_path_factory.mktemp("token") / "token"
    path.touch()
    return path


@pytest.fixture(scope="package")
def pool(interop_python: Path, tmp_path_factory: pytest.TempPathFactory, token_file: Path) -> Iterator[Pool]:
    """Peers for all tests of this folder."""
    tokens = {"MX_AUTH_TOKEN_PATH": str(token_file), "MX_AUTH_TOKEN_TTL_SECONDS": "0.001"}
    folder = tmp_path_factory.mktemp("peers")
    with contextlib.ExitStack() as stack:
        yield Pool(lambda program: stack.enter_context(started(interop_python, folder, program, **tokens)))


@pytest.fixture
async def plane() -> AsyncIterator[Running]:
    """A control plane in this process."""
    store = MemoryStore()
    async with serving(store) as running:
        yield running
    await store.close()
