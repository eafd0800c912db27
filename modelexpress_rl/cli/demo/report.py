"""What the demo shows: progress while it runs, a table of the steps, and the verdict."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import anyio
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text


@dataclass(slots=True)
class StepReport:
    """One step: what happened to its version, and what moving it took."""

    step: int
    version: str
    doing: str = "waiting"
    loss: float | None = None
    history: list[tuple[str, float]] = field(default_factory=list)
    created: float = 0.0
    wire_s: float = 0.0
    wire_bytes: int = 0
    refit_s: float = 0.0
    stall_s: float = 0.0
    proofs: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    released: bool = False
    retired: anyio.Event = field(default_factory=anyio.Event)

    def saw(self, state: str) -> None:
        """Note a state of the version, and when it was seen."""
        if not self.history or self.history[-1][0] != state:
            self.history.append((state, time.perf_counter() - self.created))
        if state in ("RETIRED", "FORGOTTEN"):
            self.retired.set()

    @property
    def proven(self) -> bool:
        """Whether every generator rank holds exactly this step's weights, all of them new."""
        return (
            bool(self.proofs)
            and not self.error
            and not any(proof["wrong"] or proof["unchanged"] for proof in self.proofs)
        )

    def verdict(self) -> Text:
        """The proof in a few words."""
        if self.error:
            return Text("failed", style="red")
        if not self.proofs:
            return Text(self.doing, style="dim")
        wrong = sum(len(proof["wrong"]) for proof in self.proofs)
        same = sum(len(proof["unchanged"]) for proof in self.proofs)
        if wrong or same:
            return Text(f"{wrong} wrong, {same} unchanged", style="red")
        return Text(f"{sum(p['parameters'] for p in self.proofs)} equal", style="green")


class Board:
    """Shows the steps live on a terminal; prints a line for each elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.steps: list[StepReport] = []
        self._live = Live(console=console, get_renderable=self.table, refresh_per_second=8, transient=True)

    def __enter__(self) -> Board:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def say(self, text: str) -> None:
        """One line, above the live table."""
        self.console.print(text, highlight=False)

    def finished(self, step: StepReport) -> None:
        """A step is over."""
        if not self.console.is_terminal:
            states = " > ".join(state for state, _ in step.history)
            self.say(f"step {step.step}: {states}; {step.verdict()}")

    def table(self) -> Table:
        """The steps so far, in at most 80 columns: of a narrower one rich would cut the figures."""
        table = Table(
            title="One version per step",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1),
            pad_edge=False,
        )
        for name in ("\nstep", "\nloss"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("            at\nstate       s", no_wrap=True)
        for name in ("read\nMiB", "wire\nms", "refit\nms", "stall\nms"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("\nproof")
        for step in self.steps:
            table.add_row(
                str(step.step),
                "" if step.loss is None else f"{step.loss:.4f}",
                "\n".join(f"{state:<9} {at:6.2f}" for state, at in step.history),
                _mebibytes(step.wire_bytes),
                _milliseconds(step.wire_s),
                _milliseconds(step.refit_s),
                _milliseconds(step.stall_s),
                step.verdict(),
            )
        return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}" if seconds else ""


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}" if size_bytes else ""
