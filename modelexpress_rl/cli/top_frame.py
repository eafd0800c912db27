"""One frame of `mx-rl top`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from modelexpress_rl.cli import show
from modelexpress_rl.cli.top_snapshot import Rates, Snapshot
from modelexpress_rl.version import VersionState, VersionStatus, WorkerRole, WorkerStatus

NAMES_SHOWN = 4
LEAST_ROWS = 5


def frame(present: Snapshot, rates: Rates | None, room: int | None = None) -> Group:
    """Everything, in at most `room` lines where that is given: the newest versions are kept."""
    present = replace(
        present,
        versions=tuple(map(show.plain, present.versions)),
        workers=tuple(map(show.plain, present.workers)),
    )
    fleet = _fleet_rows(present)
    versions: Sequence[VersionStatus] = present.versions
    hidden = 0
    if room is not None:
        rows = max(room - len(fleet) - 9, LEAST_ROWS)
        hidden = max(len(versions) - rows, 0)
        versions = versions[:rows]
    parts: list[Text | Table] = [_head(present, rates), show.versions_table(versions, bars=True)]
    if hidden:
        parts.append(Text(f"and {hidden} older ones", style="dim"))
    parts.append(_fleet_table(fleet))
    return Group(*parts)


def _head(present: Snapshot, rates: Rates | None) -> Text:
    leases = sum(status.live_leases or 0 for status in present.versions)
    trainers = sum(worker.role is WorkerRole.TRAINER for worker in present.workers)
    generators = len(present.workers) - trainers
    states = [f"{_count(present.versions, state)} {state.value}" for state in VersionState]
    head = Text()
    head.append("mx-rl top", style="bold")
    head.append(f"  {present.address}  {present.server_version}  store {present.store_kind}")
    head.append(f"  answered in {present.took_ms:.0f} ms\n", style="dim")
    head.append(", ".join(text for text in states if not text.startswith("0 ")) or "no versions")
    head.append(f"   {leases} leases   {trainers} trainers   {generators} generators\n")
    if rates is not None:
        head.append(
            f"per second: {rates.changes:.1f} versions changed, {rates.slots:.1f} slots covered, "
            f"{rates.ready:.2f} became READY",
            style="dim",
        )
    return head


def _count(versions: Sequence[VersionStatus], state: VersionState) -> int:
    return sum(status.state is state for status in versions)


def _fleet_rows(present: Snapshot) -> list[tuple[str, Text, Text, str, str]]:
    """Model, what is served, how that stands, how many generators, who they are; newest first."""
    by_id = {status.version_id: status for status in present.versions}
    newest: dict[str, VersionStatus] = {}
    for status in present.versions:  # newest first
        if status.state is VersionState.READY:
            newest.setdefault(status.model_name, status)
    groups: defaultdict[tuple[str, str, bool], list[WorkerStatus]] = defaultdict(list)
    for worker in present.workers:
        if worker.role is WorkerRole.GENERATOR:
            served = "" if worker.serving_uncertain else worker.serving_version_id or ""
            groups[worker.model_name, served, worker.serving_uncertain].append(worker)

    def order(key: tuple[str, str, bool]) -> tuple[str, int]:
        known = by_id.get(key[1])
        return key[0], -(known.sequence or 0) if known else 1

    rows = []
    for model_name, served, uncertain in sorted(groups, key=order):
        workers = groups[model_name, served, uncertain]
        names = ", ".join(worker.worker_id for worker in workers[:NAMES_SHOWN])
        more = f" and {len(workers) - NAMES_SHOWN} more" if len(workers) > NAMES_SHOWN else ""
        what = Text("UNCERTAIN", style="red") if uncertain else Text(served or "nothing yet")
        stands = _stands(by_id.get(served), newest.get(model_name)) if served else Text("")
        rows.append((model_name, what, stands, str(len(workers)), names + more))
    return rows


def _stands(served: VersionStatus | None, newest: VersionStatus | None) -> Text:
    if served is None:
        return Text("ended", style="red")
    if newest is not None and served.version_id == newest.version_id:
        return Text("newest", style="green")
    if newest is not None and (served.sequence or 0) < (newest.sequence or 0):
        return Text(f"{served.state.value}, behind {newest.version_id}", style="yellow")
    return Text(served.state.value)


def _fleet_table(rows: Sequence[tuple[str, Text, Text, str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="bold")
    for name in ("fleet of", "serves", "which is"):
        table.add_column(name, overflow="fold")
    table.add_column("generators", justify="right")
    table.add_column("who", overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if not rows:
        table.add_row("no generators", "", "", "", "")
    return table
