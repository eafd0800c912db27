"""Fixtures that every test may use, and what makes a skip a failure where nothing may be missing."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Generator

import pytest

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would all their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A virtual environment of its own has vLLM: `make test-vllm`.
collect_ignore = [] if os.environ.get("MX_TEST_VLLM") else ["vllm"]
NO_SKIP = os.environ.get("MX_TEST_NO_SKIP", "") not in ("", "0")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio, as the package does."""
    return "asyncio"


@pytest.fixture(scope="session")
async def one_event_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keeps one event loop for all asynchronous tests of a run."""
    yield  # noqa: PT022 (the loop is closed where this ends)


@pytest.fixture(autouse=True)
def _one_event_loop(request: pytest.FixtureRequest) -> None:
    """grpc.aio has one poller for a process, and fails in the next loop with what a closed one left."""
    if request.node.get_closest_marker("anyio"):
        request.getfixturevalue("one_event_loop")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure where MX_TEST_NO_SKIP is set: there, every part must be present."""
    report = yield
    if NO_SKIP and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and MX_TEST_NO_SKIP is set: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole module that is skipped while it is collected."""
    report = yield
    if NO_SKIP and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped, and MX_TEST_NO_SKIP is set: {report.longrepr}"
    return report
