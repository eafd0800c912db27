"""A plan in words and as a table, and its summary as a document, for pictures of several ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard.document import read_document

if TYPE_CHECKING:
    from modelexpress_rl.reshard.cost_plan import PlanCost
    from modelexpress_rl.reshard.plan import Plan

FORMAT = 1
MAX_DOCUMENT_BYTES = 64 << 20
MAX_NAME_CHARS = 1024


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """What is read from one device of one source."""

    slot_id: str
    worker_id: str
    device_id: int
    boxes: int
    runs: int
    shortest_run_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What one generator rank reads for one version.

    `staged_bytes` of `read_bytes` come by whole rows through scratch; `expected_s` is what all of it is
    expected to take, 0 where that was not asked.
    """

    owner: str
    needed_bytes: int
    read_bytes: int
    staged_bytes: int
    boxes: int
    runs: int
    expected_s: float
    sources: tuple[SourceSummary, ...]

    @classmethod
    def of(cls, plan: Plan, cost: PlanCost | None = None) -> PlanSummary:
        """Sum a plan up; nothing is expanded."""
        pieces, joins = plan.pieces, plan.joins()
        sources = []
        for reads in plan.reads:
            at = reads.piece_rows
            sources.append(
                SourceSummary(
                    slot_id=reads.source.slot_id,
                    worker_id=reads.source.worker_id,
                    device_id=reads.device_id,
                    boxes=reads.last - reads.first,
                    runs=int(pieces.run_count[at].sum()) - int(joins[at].sum()),
                    shortest_run_bytes=int(pieces.run_bytes[at].min()),
                    size_bytes=reads.total_bytes,
                )
            )
        return cls(
            owner=plan.owner,
            needed_bytes=plan.needed_bytes,
            read_bytes=plan.total_bytes,
            staged_bytes=0 if cost is None else cost.staged_bytes,
            boxes=len(pieces),
            runs=sum(source.runs for source in sources),
            expected_s=0.0 if cost is None else cost.expected_s,
            sources=tuple(sources),
        )

    @property
    def amplification(self) -> float:
        """Bytes read per byte needed; 1.0 where nothing is needed."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0

    def text(self) -> str:
        """A sentence, and a table with a line for each source and device."""
        workers = len({(source.slot_id, source.worker_id) for source in self.sources})
        head = (
            f"{clipped(self.owner, 80)} reads {size_text(self.read_bytes)} for "
            f"{size_text(self.needed_bytes)} needed ({self.amplification:.2f}x), "
            f"as {self.runs:,} runs of {self.boxes:,} boxes from {workers} sources"
        )
        if self.staged_bytes:
            head += f"; {size_text(self.staged_bytes)} of it by whole rows, copied out of scratch"
        if self.expected_s:
            head += f"; expected to take {self.expected_s * 1e3:,.1f} ms"
        rows = [("slot", "worker", "device", "boxes", "runs", "shortest", "bytes", "share")]
        for source in self.sources:
            share = source.size_bytes / self.read_bytes if self.read_bytes else 0.0
            rows.append(
                (
                    clipped(source.slot_id),
                    clipped(source.worker_id),
                    str(source.device_id),
                    f"{source.boxes:,}",
                    f"{source.runs:,}",
                    size_text(source.shortest_run_bytes),
                    size_text(source.size_bytes),
                    f"{share:.1%}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        align: list[Callable[[str, int], str]] = [str.ljust, str.ljust, *[str.rjust] * 6]
        lines = [
            "  ".join(put(cell, width) for put, cell, width in zip(align, row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines])

    def to_json(self) -> str:
        """The summary as a JSON document."""
        return json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, data: bytes | str) -> PlanSummary:
        """Read what `to_json` wrote.

        Raises:
            UsageError: it is something else; the message says what.
        """
        document = read_document(data, format_number=FORMAT, max_bytes=MAX_DOCUMENT_BYTES)
        sources = document.get("sources")
        if not isinstance(sources, list) or not all(isinstance(each, dict) for each in sources):
            raise UsageError("sources: expected a list of objects")
        made = tuple(SourceSummary(**_checked(SourceSummary, each)) for each in sources)
        return cls(**_checked(cls, {**document, "sources": made}))


def _checked(kind: type[Any], document: dict[str, Any]) -> dict[str, Any]:
    """The fields of `kind`, each of its type and in range."""
    found = {}
    for each in fields(kind):
        value = document.get(each.name)
        if each.name == "sources":
            good = True
        elif each.type == "str":
            good = isinstance(value, str) and len(value) <= MAX_NAME_CHARS
        elif isinstance(value, bool) or not isinstance(value, int | float):
            good = False
        else:
            good = 0 <= value < 1 << 63 and (each.type == "float" or isinstance(value, int))
        if not good:
            raise UsageError(f"{each.name}: expected a {each.type} in range, got {str(value)[:80]!r}")
        found[each.name] = value
    return found


def clipped(text: str, most: int = 28) -> str:
    """A name that fits a table: its middle left out where it is long, and nothing that moves a cursor."""
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return text if len(text) <= most else f"{text[: most - 12]}...{text[-9:]}"


def size_text(size_bytes: int) -> str:
    """A number of bytes for people."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
