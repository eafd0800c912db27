"""`mx-rl explain` and `mx-rl bench transport`."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import anyio
import pytest

from modelexpress_rl.reshard.cost import load_cost
from tests.cli.running import mx_rl
from tests.reshard.test_explain import halves

pytestmark = pytest.mark.anyio


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    for rank in (1, 0):
        (tmp_path / f"{rank}.json").write_text(halves(f"rank {rank}").to_json())
    return tmp_path


async def test_plans_as_tables_and_a_picture(plans: Path) -> None:
    ended = await mx_rl("explain", str(plans), "--svg", str(plans / "map.svg"))
    assert ended.status == 0, ended.err
    first, second = ended.out.split("\n\n")
    assert first.startswith("rank 0 reads 128.0 KiB")
    assert second.startswith("rank 1 reads 128.0 KiB")
    assert ElementTree.parse(plans / "map.svg").getroot().tag.endswith("svg")


async def test_plans_as_json(plans: Path) -> None:
    ended = await mx_rl("explain", str(plans / "1.json"), "--json")
    assert [plan["owner"] for plan in ended.body] == ["rank 1"]


async def test_a_reader_that_has_seen_enough(plans: Path) -> None:
    command = f"{sys.executable} -m modelexpress_rl.cli.main explain {plans} | head -n 1"
    done = await anyio.run_process(["bash", "-o", "pipefail", "-c", command], check=False)
    assert (done.returncode, done.stderr) == (0, b"")


async def test_what_is_no_plan_is_named(plans: Path) -> None:
    (plans / "2.json").write_text("{}")
    for words, says in (
        ((str(plans),), "2.json is no plan: expected an object with format 1"),
        ((str(plans / "3.json"),), "3.json can't be read"),
        ((str(plans / "0.json"), "--svg", str(plans / "none" / "map.svg")), "the picture can't be written"),
    ):
        ended = await mx_rl("explain", *words)
        assert (ended.status, ended.out) == (2, "")
        assert says in ended.err


async def test_a_directory_without_plans_is_named(tmp_path: Path) -> None:
    ended = await mx_rl("explain", str(tmp_path))
    assert (ended.status, "no plan" in ended.err) == (2, True)


@pytest.mark.parametrize("words", [("--mib", "1"), ("--timeout", "0")])
async def test_bench_refuses_what_can_not_be(words: tuple[str, str]) -> None:
    assert (await mx_rl("bench", "transport", *words)).status == 2


@pytest.mark.heavy
async def test_what_reads_cost_is_measured_and_stored(tmp_path: Path) -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("needs the nixl package")
    path = tmp_path / "cost.json"
    ended = await mx_rl("bench", "transport", "--mib", "16", "--output", str(path), "--json")
    assert ended.status == 0, ended.err
    assert ended.body["stored"] == str(path)
    stored = load_cost(path)
    assert stored.run_s == ended.body["run_s"]
    assert stored.wire_bytes_per_s > 1e7
    assert json.loads(path.read_text())["measured_on"] == ended.body["measured_on"]
    again = await mx_rl("bench", "transport", "--mib", "16", "--no-store")
    assert "a run costs as much as" in again.out
    assert "not stored" in again.out
