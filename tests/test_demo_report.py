"""The demo's table: whole in the eighty columns of a terminal, or of a file."""

from __future__ import annotations

import io
import time

from rich.console import Console

from modelexpress_rl.cli.demo.report import Board, StepReport


def test_no_figure_is_cut_at_eighty_columns() -> None:
    board = Board(Console(file=io.StringIO(), width=80))
    step = StepReport(
        12, "v12", loss=10.1234, wire_s=12.345, wire_bytes=123456 << 20, refit_s=1.5, stall_s=98.7
    )
    step.created = time.perf_counter() - 123.45
    for state in ("STAGING", "READY", "RELEASING", "RETIRED"):
        step.saw(state)
    step.proofs.append({"wrong": [], "unchanged": [], "parameters": 15200})
    board.steps.append(step)
    board.console.print(board.table())
    assert isinstance(board.console.file, io.StringIO)
    text = board.console.file.getvalue()
    assert "…" not in text
    for shown in (
        "12 ",
        "10.1234",
        "RELEASING",
        "123.4",
        "123456.0",
        "12345",
        "1500",
        "98700",
        "15200",
    ):
        assert shown in text, text
    assert max(map(len, text.splitlines())) <= 80
