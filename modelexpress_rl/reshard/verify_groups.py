"""Groups of small shards that land together: one digest checks them all, where each would cost a call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from modelexpress_rl.reshard.boxes import expand
from modelexpress_rl.reshard.geometry import Bool, Int
from modelexpress_rl.reshard.grid import GROUPS, SLABS, DigestGrid
from modelexpress_rl.reshard.merge import Merged
from modelexpress_rl.reshard.plan import PieceTable
from modelexpress_rl.reshard.verify_parts import Parts


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The groups that pieces bring whole, in the order of their first pieces.

    `first` is the first piece of each and `piece[start[g]]` .. the pieces, in the order in which their
    bytes are digested. `of_piece` says of every piece which group checks it, -1: none.
    """

    of_piece: Int
    first: Int
    start: Int
    piece: Int
    row: Int

    def __len__(self) -> int:
        return len(self.first)

    @classmethod
    def none(cls, pieces: int) -> Groups:
        """None of so many pieces is checked so."""
        empty = np.zeros(0, np.int64)
        return cls(np.full(pieces, -1, np.int64), empty, np.zeros(1, np.int64), empty, empty)

    @classmethod
    def of(
        cls,
        pieces: PieceTable,
        merged: Merged,
        parts: Parts,
        grid: DigestGrid,
        contiguous: Bool,
        read: Int,
    ) -> Groups:
        """Find the groups of which every shard is brought whole, once, and by one read.

        `read` says which read brings each piece, `contiguous` which pieces are so in the arena.
        """
        place = np.full(grid.count.shape[1], -1, np.int64)  # of a row among the members of groups
        place[grid.members] = np.arange(len(grid.members))
        where = place[merged.manifest_row[pieces.row]]
        one_slab = (parts.level == SLABS) & (parts.parts == 1).all(axis=1)
        whole = one_slab & contiguous & (parts.verified_bytes == pieces.size_bytes) & (where >= 0)
        brought = np.flatnonzero(whole)
        brought = brought[np.argsort(where[brought], kind="stable")]
        group = np.searchsorted(grid.group_start, where[brought], side="right") - 1
        begin = np.flatnonzero(np.append(True, group[1:] != group[:-1])[: len(group)])
        if not len(begin):
            return cls.none(len(pieces))
        number = group[begin]
        count = np.diff(np.append(begin, len(brought)))
        # As many as there are, and none twice; and all by the read that brings the first.
        twice = np.append(False, where[brought][1:] == where[brought][:-1])
        complete = count == np.diff(grid.group_start)[number]
        complete &= ~np.logical_or.reduceat(twice, begin)
        reads = read[brought]
        complete &= np.maximum.reduceat(reads, begin) == np.minimum.reduceat(reads, begin)
        first = np.minimum.reduceat(brought, begin)
        chosen = np.flatnonzero(complete)
        chosen = chosen[np.argsort(first[chosen])]
        _, at = expand(begin[chosen], count[chosen])
        found = cls(
            of_piece=np.full(len(pieces), -1, np.int64),
            first=first[chosen],
            start=np.concatenate([np.zeros(1, np.int64), np.cumsum(count[chosen])]),
            piece=brought[at],
            row=grid.group_row[number[chosen]],
        )
        found.of_piece[found.piece] = np.repeat(np.arange(len(found)), count[chosen])
        return found

    def asked(self, rows: Int, parts: Parts) -> tuple[Int, Parts]:
        """(rows, parts) with the row and level of a group's digest for each of its pieces."""
        grouped = self.of_piece >= 0
        out = np.where(grouped, self.row[self.of_piece] if len(self) else 0, rows)
        return out, replace(parts, level=np.where(grouped, GROUPS, parts.level))
