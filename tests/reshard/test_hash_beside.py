"""Copies that are made while memory is hashed: both come out as if each had been done alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from modelexpress_rl.reshard import hash_beside as module
from modelexpress_rl.reshard.hash_beside import do_all, hash_beside, in_blocks
from tests.examples import many


@many
@given(st.data())
def test_digests_and_copies_are_as_of_each_alone(data: st.DataObject) -> None:
    arena = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 256, 4096, np.uint8)
    cuts = sorted(data.draw(st.sets(st.integers(0, 4096), min_size=2, max_size=6)))
    spans = list(pairwise(cuts))
    boxes = data.draw(
        st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(0, 60), st.integers(1, 4)))
    )
    grid = arena.reshape(32, 2, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", data.draw(st.sampled_from([16, 100, 1024])))
        beside, expected = [], []
        for row, rows, column, columns in boxes:
            source = grid[row : row + rows, :, column : column + columns]
            target = np.zeros_like(source)
            beside += in_blocks(target, source, row * 128 + column, 128)
            expected.append((target, source.copy()))
        found = hash_beside(
            [arena[a:b].data for a, b in spans], [end for _, end in spans], sorted(beside, key=lambda b: b[0])
        )
    assert found == b"".join(xxhash.xxh3_128_digest(arena[a:b].tobytes()) for a, b in spans)
    assert all(np.array_equal(target, source) for target, source in expected)


def test_copies_are_made_in_blocks_even_where_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    source = np.arange(256, dtype=np.uint8).reshape(16, 16)
    target = np.zeros_like(source)
    copies = in_blocks(target, source, 1000, 16)
    assert [end for end, _, _ in copies] == [1064, 1128, 1192, 1256]
    do_all(copies)
    assert np.array_equal(target, source)
    single = np.array(b"run", np.dtype((np.void, 3)))
    (end, _, _), *more = in_blocks(np.empty_like(single), single, 5, 3)
    assert (end, more) == (8, [])
