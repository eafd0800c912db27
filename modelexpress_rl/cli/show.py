"""Versions and workers as people read them: tables, bars and spans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from modelexpress_rl.printable import printable
from modelexpress_rl.version import VersionState, VersionStatus, WorkerStatus

T = TypeVar("T", VersionStatus, WorkerStatus)

BAR = 16
STYLES = {
    VersionState.STAGING: "yellow",
    VersionState.READY: "green",
    VersionState.DEGRADED: "red",
    VersionState.RELEASING: "cyan",
    VersionState.RETIRED: "dim",
    VersionState.FORGOTTEN: "dim",
}


def plain(told: T) -> T:
    """What a server told, with every text as it may be printed; see `printable`."""
    changes: dict[str, Any] = {}
    for name in (field.name for field in fields(told)):
        value = getattr(told, name)
        if type(value) is str:
            changes[name] = printable(value)
        elif isinstance(value, tuple):
            changes[name] = tuple(printable(one) for one in value)
    return replace(told, **changes)


def versions_table(versions: Iterable[VersionStatus], *, bars: bool = False, reasons: bool = True) -> Table:
    """A line for each version; `bars` draws the coverage."""
    table = _table()
    table.add_column("version", overflow="fold")
    table.add_column("model", overflow="fold")
    table.add_column("seq", justify="right")
    table.add_column("state")
    table.add_column("slots", no_wrap=True)
    table.add_column("publishers", justify="right")
    table.add_column("leases", justify="right")
    table.add_column("age", justify="right")
    if reasons:
        table.add_column("why", overflow="fold")
    for status in map(plain, versions):
        cells: list[str | Text] = [
            status.version_id,
            status.model_name,
            _number(status.sequence),
            Text(status.state.value, style=STYLES[status.state]),
            coverage(status, bar=bars),
            _number(status.live_publications),
            _number(status.live_leases),
            age(status),
        ]
        table.add_row(*cells, *([why(status)] if reasons else []))
    return table


def workers_table(workers: Iterable[WorkerStatus], now_unix_ms: int | None) -> Table:
    """A line for each worker."""
    table = _table()
    for name in ("worker", "role", "model", "life"):
        table.add_column(name, overflow="fold")
    table.add_column("for", justify="right")
    table.add_column("serves", overflow="fold")
    for worker in map(plain, workers):
        left_ms = None if now_unix_ms is None else worker.expires_at_unix_ms - now_unix_ms
        table.add_row(
            worker.worker_id,
            worker.role.value,
            worker.model_name,
            Text("LIVE" if worker.live else "EXPIRED", style="green" if worker.live else "dim"),
            span(left_ms) if worker.live else "",
            serves(worker),
        )
    return table


def coverage(status: VersionStatus, *, bar: bool = False) -> Text:
    """How many of the expected slots have a live publisher."""
    if not status.expected_slots:
        return Text("object storage", style="dim")
    share = status.covered_slots / status.expected_slots
    full = status.covered_slots == status.expected_slots
    text = Text(style="green" if full else "yellow")
    if bar:
        filled = BAR if full else min(int(share * BAR), BAR - 1)
        text.append("█" * filled + "░" * (BAR - filled) + " ")
    return text.append(f"{status.covered_slots}/{status.expected_slots}")


def serves(worker: WorkerStatus) -> Text:
    """What a generator reported."""
    if worker.serving_uncertain:
        return Text("UNCERTAIN", style="red")
    return Text(worker.serving_version_id or "")


def why(status: VersionStatus) -> str:
    """The reason of the state, and the first slots that are missing."""
    parts = [status.reason] if status.reason else []
    if status.missing_slots and status.state in (VersionState.STAGING, VersionState.DEGRADED):
        shown = ", ".join(status.missing_slots[:3])
        more = status.expected_slots - status.covered_slots - len(status.missing_slots[:3])
        parts.append(f"missing {shown}" + (f" and {more} more" if more > 0 else ""))
    return "; ".join(parts)


def age(status: VersionStatus) -> str:
    """How long ago it was created, by the store's clock."""
    if status.now_unix_ms is None or status.created_at_unix_ms is None:
        return ""
    return span(status.now_unix_ms - status.created_at_unix_ms)


def span(value_ms: int | None) -> str:
    """A span in its two largest units."""
    if value_ms is None:
        return ""
    total_s = max(value_ms, 0) // 1000
    days, rest = divmod(total_s, 86_400)
    hours, rest = divmod(rest, 3_600)
    minutes, seconds = divmod(rest, 60)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    if minutes:
        return f"{minutes}m{seconds:02}s"
    return f"{seconds}s"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="bold")


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
