"""The window of a round: who is posted next, and how much is in flight."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from modelexpress_rl.inference.planning import Chunk
from modelexpress_rl.inference.window import SOURCE_BYTES, Window
from modelexpress_rl.reshard.geometry import Source

MIB = 1 << 20


def chunks(*sizes: tuple[str, int]) -> list[Chunk]:
    return [
        Chunk(Source("s", worker, f"agent-{worker}"), number, number + 1, size, b"")
        for number, (worker, size) in enumerate(sizes)
    ]


def posted(window: Window) -> list[int]:
    """Everything that may be posted now, by number."""
    numbers = []
    while (chunk := window.next()) is not None:
        numbers.append(chunk.first)
    return numbers


def test_every_source_is_posted_before_any_gets_a_second_turn() -> None:
    many = chunks(*[("a", MIB)] * 3, *[("b", MIB)] * 3, ("c", MIB))
    window = Window(many, 5 * MIB)
    assert posted(window) == [0, 3, 6, 1, 4]
    window.landed(many[3])  # of b: now it has as little in flight as c, which has nothing more
    assert posted(window) == [5]
    assert not window.exhausted
    window.give_up(many[0].source)
    assert window.exhausted
    assert posted(window) == []


def test_what_is_bigger_than_the_window_goes_alone() -> None:
    many = chunks(("a", 10), ("b", 99), ("c", 10))
    window = Window(many, 50)
    assert posted(window) == [0]
    window.landed(many[0])
    assert posted(window) == [1]
    window.landed(many[1])
    assert posted(window) == [2]


def test_one_source_never_has_more_than_its_share() -> None:
    many = chunks(*[("a", SOURCE_BYTES // 2)] * 4)
    window = Window(many, 100 * SOURCE_BYTES)
    assert posted(window) == [0, 1]
    window.landed(many[1])
    assert posted(window) == [2]


def test_a_source_that_was_given_up_makes_room_and_its_late_reads_count_no_more() -> None:
    many = chunks(("a", 40), ("b", 40), ("b", 40))
    window = Window(many, 80)
    assert posted(window) == [0, 1]
    window.give_up(many[0].source)
    window.landed(many[0])
    assert posted(window) == [2]
    assert window.in_flight == {many[1].source: 80}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=30), st.data())
def test_everything_is_posted_once_within_the_bound(
    sizes: list[tuple[str, int]], data: st.DataObject
) -> None:
    many = chunks(*sizes)
    window = Window(many, 50)
    flying: list[Chunk] = []
    seen: list[int] = []
    while not window.exhausted or flying:
        while (chunk := window.next()) is not None:
            flying.append(chunk)
            seen.append(chunk.first)
            assert len(flying) == 1 or sum(each.total_bytes for each in flying) <= 50
        assert flying
        window.landed(flying.pop(data.draw(st.integers(0, len(flying) - 1))))
    assert sorted(seen) == list(range(len(many)))
