"""A plan in words, as a table, as a document and as a picture."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard.cost import DEFAULT_COST
from modelexpress_rl.reshard.cost_plan import PlanCost
from modelexpress_rl.reshard.explain import PlanSummary, SourceSummary
from modelexpress_rl.reshard.explain_svg import heat_map
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.planner import plan
from modelexpress_rl.reshard.row_staging import choose
from modelexpress_rl.reshard.row_staging_wire import wire
from tests.reshard.digested import one_tensor

HOSTILE = "</text><script>alert('x')</script>\x00\x1b[2J\ud800\"&"
SVG = "{http://www.w3.org/2000/svg}"


def halves(owner: str = "rank 2") -> PlanSummary:
    """A whole tensor from two workers that hold column halves of it."""
    world = one_tensor((512, 128), ((0, 0), (512, 64)), ((0, 64), (512, 64)), dtype="torch.bfloat16")
    needs = NeedTable.build([Need("t", "torch.bfloat16", (0, 0), (512, 128))], owner=owner)
    merged = world.merged()
    made = wire(choose(plan(needs, merged), merged, DEFAULT_COST), needs, merged)
    return PlanSummary.of(made.plan, PlanCost.of(made, DEFAULT_COST, reads=2))


def named(owner: str, slot: str, worker: str, size_bytes: int) -> PlanSummary:
    source = SourceSummary(slot, worker, 0, 1, 1, size_bytes, size_bytes)
    return PlanSummary(owner, size_bytes, size_bytes, 0, 1, 1, 0.0, (source,))


def test_words_and_a_table() -> None:
    text = halves().text()
    assert text.splitlines() == [
        "rank 2 reads 128.0 KiB for 128.0 KiB needed (1.00x), as 2 runs of 2 boxes from 2 sources; "
        "128.0 KiB of it by whole rows, copied out of scratch; expected to take 0.3 ms",
        "slot    worker  device  boxes  runs  shortest     bytes  share",
        "slot-0  w0           0      1     1  64.0 KiB  64.0 KiB  50.0%",
        "slot-1  w1           1      1     1  64.0 KiB  64.0 KiB  50.0%",
    ]


def test_a_document_comes_back() -> None:
    made = halves()
    assert PlanSummary.from_json(made.to_json()) == made
    assert PlanSummary.from_json(made.to_json().encode()) == made


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "format 1"),
        ({"owner": 3}, "owner: expected a str"),
        ({"owner": "x" * 2000}, "owner: expected a str"),
        ({"runs": -1}, "runs: expected a int"),
        ({"runs": 1.5}, "runs: expected a int"),
        ({"runs": 1 << 70}, "runs: expected a int"),
        ({"boxes": True}, "boxes: expected a int"),
        ({"expected_s": float("nan")}, "expected_s: expected a float"),
        ({"sources": {}}, "sources: expected a list"),
        ({"sources": [[]]}, "sources: expected a list"),
        ({"sources": [{"slot_id": "s"}]}, "worker_id: expected a str"),
    ],
)
def test_another_document_is_refused(change: dict[str, Any], says: str) -> None:
    document = {**json.loads(halves().to_json()), **change}
    with pytest.raises(UsageError, match=says):
        PlanSummary.from_json(json.dumps(document))


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"[]", b"\xff"])
def test_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError):
        PlanSummary.from_json(data)


def test_a_picture_has_a_row_for_each_rank_and_a_column_for_each_source() -> None:
    plans = [named("rank 0", "s0", "w0", 3 << 20), named("rank 1", "s0", "w1", 1 << 20)]
    root = ElementTree.fromstring(heat_map(plans))
    cells = [g for g in root.findall(f"{SVG}g") if g.find(f"{SVG}rect") is not None]
    assert [g.findtext(f"{SVG}title") for g in cells] == [
        "rank 0 reads 3.0 MiB (100.0%) from worker w0, slot s0",
        "rank 0 reads 0 B (0.0%) from worker w1, slot s0",
        "rank 1 reads 0 B (0.0%) from worker w0, slot s0",
        "rank 1 reads 1.0 MiB (100.0%) from worker w1, slot s0",
    ]
    fills = [g.find(f"{SVG}rect").get("fill") for g in cells]  # type: ignore[union-attr]
    assert len(set(fills)) == 3
    assert fills[0] == "rgb(8,69,148)"  # who reads most is darkest
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert "2 ranks read 4.0 MiB from 2 sources, 1.00 bytes for each byte needed, in 2 runs" in words


def test_hostile_names_stay_names() -> None:
    made = named(HOSTILE, HOSTILE, HOSTILE, 10)
    picture = heat_map([made])
    root = ElementTree.fromstring(picture)
    assert {element.tag for element in root.iter()} == {
        SVG + tag for tag in ("svg", "rect", "g", "title", "text")
    }
    assert not re.search("[\x00-\x08\x1b\ud800-\udfff]", picture)
    assert "\x1b" not in made.text()
    assert PlanSummary.from_json(made.to_json()) == made


def test_pictures_that_can_not_be() -> None:
    with pytest.raises(UsageError, match="at least one plan"):
        heat_map([])
    many = [named(f"rank {n}", "s", f"w{n}", 1) for n in range(210)]
    with pytest.raises(UsageError, match="210 ranks x 210 sources are more than 40000 cells"):
        heat_map(many)
    assert "1.00 bytes" in heat_map([PlanSummary("idle", 0, 0, 0, 0, 0, 0.0, ())])
