"""Fixtures that every test may use, and what makes a skip a failure where nothing may be missing."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

NO_SKIP = os.environ.get("MX_TEST_NO_SKIP", "") not in ("", "0")


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio, as the package does."""
    return "asyncio"


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
