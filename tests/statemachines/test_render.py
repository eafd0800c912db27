"""The pages of the machines: written from the tables, the same every time, and not stale."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from statemachines import lease, render, version


def test_the_pages_are_not_stale() -> None:
    assert render.stale() == [], "run python -m statemachines.render"


def test_a_page_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render.main([str(tmp_path / "machines")])
    assert capsys.readouterr().out.count("wrote ") == len(render.MACHINES)
    render.main([str(tmp_path / "machines")])
    assert capsys.readouterr().out == ""
    (tmp_path / "machines" / "lease.md").write_text("old")
    assert render.stale(tmp_path / "machines") == ["lease.md"]


def test_it_runs_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["render", str(tmp_path)])
    monkeypatch.delitem(sys.modules, "statemachines.render")
    runpy.run_module("statemachines.render", run_name="__main__")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(render.pages())


def test_the_usual_directory_is_that_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    render.main([])
    assert capsys.readouterr().out == ""


def test_a_diagram_groups_the_events_of_a_pair_of_states() -> None:
    assert render.diagram(lease.TABLE).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> HELD",
        "    HELD --> HELD: Renew",
        "    HELD --> RETURNED: Return",
        "    HELD --> LAPSED: Lapse [is_over]<br/>Return [is_over]",
        "    RETURNED --> [*]",
        "    LAPSED --> [*]",
    ]


def test_a_page_names_every_guard_and_every_check() -> None:
    page = render.page(version)
    for cell in version.TABLE.cells:
        for check in cell.checks:
            assert f"* `{check.__name__}`: Check: " in page
    assert "| RELEASING | WithdrawShard | nobody_reads, shard_is_published |" in page
    assert "* `completes`: Guard: " in page
