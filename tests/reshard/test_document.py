"""Documents are written whole or not at all, and never in the place of what is no file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard.cost import DEFAULT_COST, load_cost, store_cost
from modelexpress_rl.reshard.document import read_document, write_document


def test_what_is_no_regular_file_stays_what_it_is(tmp_path: Path) -> None:
    """A device at the path was replaced by a file."""
    fifo = tmp_path / "costs"
    os.mkfifo(fifo)
    with pytest.raises(UsageError, match=r"costs: the costs can't be stored there: .*no regular file"):
        store_cost(DEFAULT_COST, fifo, measured_on="here")
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    with pytest.raises(UsageError, match="no regular file"):
        store_cost(DEFAULT_COST, tmp_path, measured_on="here")
    assert os.listdir(tmp_path) == ["costs"]


def test_a_disk_that_fills_up_leaves_the_former_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "document"
    write_document(path, "former")

    def full(self: Path, text: str, **_: object) -> int:
        with self.open("w") as file:
            file.write(text[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_document(path, "latter")
    monkeypatch.undo()
    assert path.read_text() == "former"
    assert os.listdir(tmp_path) == ["document"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{" * 5000, "no JSON"),
        (b"[]", "an object with format 1"),
        (b'{"format": 2}', "an object with format 1"),
        (b"\xff", "no JSON"),
        (b" " * 10_001, "at most 10000 bytes, got 10001"),
    ],
)
def test_what_is_read_is_bounded_and_known(data: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_document(data, format_number=1, max_bytes=10_000)


def test_costs_come_back(tmp_path: Path) -> None:
    store_cost(DEFAULT_COST, tmp_path / "deeper" / "costs", measured_on="here")
    assert load_cost(tmp_path / "deeper" / "costs") == DEFAULT_COST
