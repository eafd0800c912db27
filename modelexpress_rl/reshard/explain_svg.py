"""Who reads how much from whom, as a picture: a heat map of generator ranks and sources, in SVG."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard.explain import PlanSummary, clipped, size_text

CELL_WIDTH, CELL_HEIGHT = 84, 30
LABEL_WIDTH, HEAD_HEIGHT = 250, 230
MAX_CELLS = 40_000
_LIGHT, _DARK = (247, 251, 255), (8, 69, 148)

# What XML 1.0 can't hold, not even escaped.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_Column = tuple[str, str]


def heat_map(plans: Sequence[PlanSummary]) -> str:
    """A row for each plan, a column for each source (slot, worker), a cell's colour by its bytes.

    Every cell has a tooltip with all figures. Names are escaped, whatever they hold.

    Raises:
        UsageError: there is no plan, or more than `MAX_CELLS` cells.
    """
    if not plans:
        raise UsageError("heat map: expected at least one plan")
    columns = sorted({(source.slot_id, source.worker_id) for plan in plans for source in plan.sources})
    if len(columns) * len(plans) > MAX_CELLS:
        raise UsageError(
            f"heat map: {len(plans)} ranks x {len(columns)} sources are more than {MAX_CELLS} cells"
        )
    cells = [_by_column(plan) for plan in plans]
    most = max((size for row in cells for size in row.values()), default=0)
    width = LABEL_WIDTH + CELL_WIDTH * (len(columns) + 1) + 180  # the last label leans to the right
    height = HEAD_HEIGHT + CELL_HEIGHT * (len(plans) + 1) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(12, 24, _title(plans, len(columns)), size=15),
        *(_head(number, column) for number, column in enumerate(columns)),
        _text(LABEL_WIDTH + CELL_WIDTH * (len(columns) + 0.5), HEAD_HEIGHT - 10, "all", anchor="middle"),
    ]
    for number, (plan, row) in enumerate(zip(plans, cells, strict=True)):
        top = HEAD_HEIGHT + CELL_HEIGHT * number
        label = _text(LABEL_WIDTH - 8, top + 20, clipped(plan.owner, 36), anchor="end")
        parts.append(f"<g><title>{_escaped(plan.text())}</title>{label}</g>")
        parts += [_cell(at, top, row.get(column, 0), most, plan, column) for at, column in enumerate(columns)]
        total = f"{size_text(plan.read_bytes)} ({plan.amplification:.2f}x)"
        parts.append(_text(LABEL_WIDTH + CELL_WIDTH * len(columns) + 8, top + 20, total))
    bottom = HEAD_HEIGHT + CELL_HEIGHT * len(plans) + 20
    parts.append(_text(LABEL_WIDTH - 8, bottom, "all", anchor="end"))
    for at, column in enumerate(columns):
        total = size_text(sum(row.get(column, 0) for row in cells))
        parts.append(_text(LABEL_WIDTH + CELL_WIDTH * (at + 0.5), bottom, total, anchor="middle"))
    return "\n".join([*parts, "</svg>", ""])


def _by_column(plan: PlanSummary) -> dict[_Column, int]:
    found: dict[_Column, int] = {}
    for source in plan.sources:
        column = source.slot_id, source.worker_id
        found[column] = found.get(column, 0) + source.size_bytes
    return found


def _title(plans: Sequence[PlanSummary], sources: int) -> str:
    read, needed = (sum(getattr(plan, name) for plan in plans) for name in ("read_bytes", "needed_bytes"))
    ranks = "1 rank reads" if len(plans) == 1 else f"{len(plans)} ranks read"
    return (
        f"{ranks} {size_text(read)} from {sources} sources, {read / needed if needed else 1.0:.2f} bytes "
        f"for each byte needed, in {sum(plan.runs for plan in plans):,} runs"
    )


def _head(number: int, column: _Column) -> str:
    x, y = LABEL_WIDTH + CELL_WIDTH * (number + 0.5), HEAD_HEIGHT - 10
    slot, worker = column
    words = _escaped(f"{clipped(worker)} / {clipped(slot, 20)}")
    full = _escaped(f"worker {worker}, slot {slot}")
    return f'<g><title>{full}</title><text x="{x}" y="{y}" transform="rotate(-40 {x} {y})">{words}</text></g>'


def _cell(at: int, top: int, size_bytes: int, most: int, plan: PlanSummary, column: _Column) -> str:
    x = LABEL_WIDTH + CELL_WIDTH * at
    strength = size_bytes / most if most else 0.0
    colour = ",".join(str(round(a + (b - a) * strength)) for a, b in zip(_LIGHT, _DARK, strict=True))
    share = size_bytes / plan.read_bytes if plan.read_bytes else 0.0
    slot, worker = column
    about = f"{plan.owner} reads {size_text(size_bytes)} ({share:.1%}) from worker {worker}, slot {slot}"
    words = ""
    if size_bytes:
        fill = "white" if strength > 0.5 else "black"
        words = _text(x + CELL_WIDTH / 2, top + 20, size_text(size_bytes), anchor="middle", fill=fill)
    return (
        f'<g><title>{_escaped(about)}</title><rect x="{x}" y="{top}" width="{CELL_WIDTH}" '
        f'height="{CELL_HEIGHT}" fill="rgb({colour})" stroke="#ccc"/>{words}</g>'
    )


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, fill: str = "black"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">'
        f"{_escaped(words)}</text>"
    )


def _escaped(words: str) -> str:
    return escape(_NO_XML.sub("\N{REPLACEMENT CHARACTER}", words))
