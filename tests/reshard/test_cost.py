"""The constants of a machine: stored and read again, and never in the way of a refit."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from modelexpress_rl import envs
from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard.cost import DEFAULT_COST, TransportCost, decode_cost, load_cost, store_cost

COST = TransportCost(wire_bytes_per_s=2e9, run_s=1e-6, read_s=1e-4, copy_bytes_per_s=4e9)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MX_TRANSPORT_COST_FILE", raising=False)
    return tmp_path


def test_what_is_stored_is_loaded(cache: Path) -> None:
    assert load_cost() is DEFAULT_COST
    store_cost(COST, Path(envs.transport_cost_file()), measured_on="here")
    assert load_cost() == COST
    stored = cache / "modelexpress_rl" / "transport-cost.json"
    assert json.loads(stored.read_text())["measured_on"] == "here"
    assert [each.name for each in stored.parent.iterdir()] == [stored.name]


def test_the_environment_names_another_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_TRANSPORT_COST_FILE", str(cache / "mine.json"))
    with pytest.raises(UsageError, match=r"MX_TRANSPORT_COST_FILE: .*mine\.json does not exist"):
        load_cost()
    store_cost(COST, cache / "mine.json", measured_on="")
    assert load_cost() == COST


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "no JSON"),
        (b"[" * 60_000, "no JSON"),
        (b"[]", "format 1"),
        (b'{"format": 2}', "format 1"),
        (b'{"format": 1, "run_s": 1}', "lacks wire_bytes_per_s, read_s, copy_bytes_per_s"),
        (b" " * (1 << 17), "at most"),
        *(
            (json.dumps({"format": 1, **dict.fromkeys(TransportCost.__slots__, value)}).encode(), "positive")
            for value in (0, -1, True, "1", None, float("nan"), float("inf"))
        ),
    ],
)
def test_a_damaged_file_is_told_and_not_used(
    content: bytes, says: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=says):
        decode_cost(content)
    path = cache / "modelexpress_rl" / "transport-cost.json"
    path.parent.mkdir()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert load_cost() is DEFAULT_COST
    assert str(path) in caplog.text


def test_a_file_that_can_not_be_read_or_written(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "modelexpress_rl").write_text("a file where a directory should be")
    with pytest.raises(UsageError, match="can't be stored"):
        store_cost(COST, Path(envs.transport_cost_file()), measured_on="")
    with caplog.at_level(logging.WARNING):
        assert load_cost() is DEFAULT_COST
    assert "can't be read" in caplog.text


def test_costs_add_up_for_numbers_and_columns() -> None:
    assert COST.seconds(wire_bytes=2e9, runs=10, reads=2, copied_bytes=4e9) == pytest.approx(2.00021)
    found = COST.seconds(wire_bytes=np.array([0, 2e9]), runs=np.array([1, 0]))
    assert found.tolist() == pytest.approx([1e-6, 1.0])
