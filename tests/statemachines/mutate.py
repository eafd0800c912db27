"""What each guard and each check is for: each is taken away, and something must fail.

`python -m tests.statemachines.mutate` prints, for every guard and check of every machine, the example
that notices its absence, and the promise that breaks without it, with the number of moves of the story
that shows it. `--search` looks for those stories anew (minutes) and writes them to tests/data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Printed

from statemachines.invariants import broken_by, violations
from statemachines.kernel import Cell, Row, Table, always
from statemachines.rundown import Rundown
from statemachines.world import Config, Move, moves, start, step
from statemachines.world_server import forget
from tests.statemachines.checking import MACHINES, first_wrong, rebuilt
from tests.statemachines.examples import Machine
from tests.statemachines.explorer import explore

STORIES = Path(__file__).parent.parent / "data" / "stories_of_mutants.json"
WORLDS: tuple[Config, ...] = (
    Config(stray=True),
    Config(failed_reads=1),
    Config(cuts=1),
    Config(slots=("a", "b"), published=True),
    Config(unanswered=1),
    Config(flushes=1, creations=1),
    Config(crashes=1, restarts=1),
    Config(slots=("a", "a"), failed_reads=1, published=True),
    Config(slots=("a", "a"), cuts=1, published=True),
)


# The world has no occasion for these: it asks for one version, by the right workers, of the right slots.
BEYOND_THE_WORLD = frozenset(
    {
        "slot_is_expected",
        "is_in_storage",
        "lease_id_is_free",
        "reader_may",
        "same_identity",
        "is_generator",
        "coverage_is_proven",
        "digests_agree",
        "shard_is_published",
        "no_other_content",
        "is_of_an_earlier_use",
        "is_being_copied",
        "is_this_use",
        "nothing_writes",
        "copy_is_whole",
    }
)


@dataclass(frozen=True)
class Mutant:
    """A machine without one of its functions: in one cell, or (`cell` None) in all of them.

    `how` is "always" or "never" for a guard, "absent" for a check.
    """

    machine: Machine
    function: str
    how: str
    cell: tuple[Any, type] | None = None

    @property
    def name(self) -> str:
        where = f" in {self.cell[0].value} x {self.cell[1].__name__}" if self.cell else ""
        return f"{self.machine.table.name}.{self.function} {self.how}{where}"

    @property
    def key(self) -> str:
        return f"{self.machine.table.name}.{self.function} {self.how}"

    def table(self) -> Table[Any, Any]:
        """The table of the mutant."""
        return rebuilt(self.machine.table, (self._mutated(cell) for cell in self.machine.table.cells))

    def _mutated(self, cell: Cell) -> Cell:
        if self.cell not in (None, (cell.state, cell.event)):
            return cell
        if self.how == "absent":
            return replace(cell, checks=tuple(c for c in cell.checks if c.__name__ != self.function))
        answer = self.how == "always"
        rows = (
            Row(row.target, row.do, lambda *_: answer) if row.when.__name__ == self.function else row
            for row in cell.rows
        )
        return replace(cell, rows=tuple(rows))


def mutants(machine: Machine, *, by_cell: bool) -> Iterator[Mutant]:
    """Every mutant of a machine."""
    seen: set[str] = set()
    for cell in machine.table.cells:
        where = (cell.state, cell.event) if by_cell else None
        guards = {row.when.__name__ for row in cell.rows if row.when is not always}
        kinds = [(name, how) for name in sorted(guards) for how in ("always", "never")]
        kinds += [(check.__name__, "absent") for check in cell.checks]
        for name, how in kinds:
            mutant = Mutant(machine, name, how, where)
            if mutant.name not in seen:
                seen.add(mutant.name)
                yield mutant


@contextmanager
def in_force(mutant: Mutant) -> Iterator[None]:
    """While this lasts the mutant's table decides, wherever its machine is asked."""
    module = mutant.machine.module
    forget()
    broken_by.cache_clear()
    before = module.TABLE
    module.TABLE = mutant.table()
    try:
        yield
    finally:
        module.TABLE = before
        forget()
        broken_by.cache_clear()


@dataclass(frozen=True)
class Story:
    """A way through a world that breaks a promise once a guard or check is gone."""

    breaks: str
    config: Config
    path: tuple[Move, ...]

    def tell(self) -> str | None:
        """What is broken along the way; None where everything holds, or the story can't go on."""
        world = start(self.config)
        for move in self.path:
            if move not in moves(world):
                return None
            taken = step(world, move)
            if broken := violations(taken):
                return broken[0]
            world = taken.after
        return next(iter(Rundown().broken_in(world)), None)


def stories() -> dict[str, Story]:
    """The stories that were found, by mutant."""
    told = json.loads(STORIES.read_text(encoding="utf-8"))
    return {
        name: Story(
            one["breaks"],
            Config(**{key: tuple(v) if isinstance(v, list) else v for key, v in one["world"].items()}),
            tuple(_move(words) for words in one["moves"]),
        )
        for name, one in told.items()
    }


def _move(words: str) -> Move:
    """A move as it was written: "call register 0 ok"; what follows the number of a call is one word."""
    parts = words.split(" ", 3 if words.startswith("call ") else -1)
    return tuple(int(part) if part.isdigit() else part for part in parts)


def search(mutant: Mutant, *, max_states: int, max_s: float) -> Story | None:
    """The shortest story that the first world that has one can tell of a mutant."""
    with in_force(mutant):
        for config in WORLDS:
            try:
                found = explore(config, max_states=max_states, max_s=max_s, rundown=Rundown())
            except Exception as error:  # noqa: BLE001 - a mutant may fail in any way
                print(f"{mutant.name}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            if found.broken:
                return Story(found.broken[0].partition(":")[0], config, found.path)
    return None


def holds(mutant: Mutant, story: Story) -> bool:
    """Whether a story still breaks its promise with the mutant, and none without it."""
    with in_force(mutant):
        broken = story.tell()
    return broken is not None and broken.startswith(story.breaks) and story.tell() is None


def write(found: dict[str, Story]) -> None:
    """Keep stories for the tests."""
    usual = Config()
    told = {
        name: {
            "breaks": story.breaks,
            "world": {f: v for f in Config.__slots__ if (v := getattr(story.config, f)) != getattr(usual, f)},
            "moves": [" ".join(str(part) for part in move) for move in story.path],
        }
        for name, story in sorted(found.items())
    }
    STORIES.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Print what each guard and check is for."""
    known = stories() if STORIES.exists() else {}
    if "--search" in arguments:
        wanted = [word for word in arguments if not word.startswith("--")]
        for machine in MACHINES:
            for mutant in mutants(machine, by_cell=False):
                if mutant.function in BEYOND_THE_WORLD or not any(w in mutant.name for w in wanted or [""]):
                    continue
                if mutant.key in known and holds(mutant, known[mutant.key]):
                    continue
                known.pop(mutant.key, None)
                story = search(mutant, max_states=25_000, max_s=15)
                print(mutant.name, "->", story and (story.breaks, len(story.path)), flush=True)
                if story is not None:
                    known[mutant.key] = story
                write(known)
    printed = Printed("guard or check", "is", "breaks", "in moves", "and is noticed by the example")
    for machine in MACHINES:
        for mutant in mutants(machine, by_cell=False):
            story = known.get(mutant.key)
            noticed = first_wrong(machine, mutant.table()) or "NONE"
            promise, moves = (story.breaks, str(len(story.path))) if story else ("", "")
            printed.add_row(f"{machine.table.name}.{mutant.function}", mutant.how, promise, moves, noticed)
    Console().print(printed)


if __name__ == "__main__":
    main(sys.argv[1:])
