"""Checking bytes that landed against their publisher's digests, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from typing import NoReturn

import numpy as np
import xxhash

from modelexpress_rl.errors import DigestMismatch, UsageError
from modelexpress_rl.reshard.boxes import expand
from modelexpress_rl.reshard.digests import as_box, box_digests
from modelexpress_rl.reshard.geometry import DIGEST_BYTES, Bool, Bytes, Int, unpadded, widened
from modelexpress_rl.reshard.grid import DigestGrid, Selection
from modelexpress_rl.reshard.hash_beside import Beside, do_all, hash_beside
from modelexpress_rl.reshard.merge import Merged
from modelexpress_rl.reshard.needs import NeedTable
from modelexpress_rl.reshard.plan import PieceTable, Plan
from modelexpress_rl.reshard.verify_groups import Groups
from modelexpress_rl.reshard.verify_parts import (
    Flat,
    Parts,
    asks_of,
    best_parts,
    flatten,
    lies_contiguous,
    whole_ask,
)


@dataclass(frozen=True, slots=True)
class Verified:
    """What a check covered. `unverified_bytes` lie in parts that a need cuts, or have no digests."""

    verified_bytes: int
    unverified_bytes: int

    def __add__(self, other: Verified) -> Verified:
        return Verified(
            self.verified_bytes + other.verified_bytes, self.unverified_bytes + other.unverified_bytes
        )


@dataclass(frozen=True, slots=True, eq=False)
class Hashed:
    """What was found of the pieces at `own`, counted from the source's first: digests, joined."""

    own: Int
    flat: bytes
    groups: bytes
    strided: list[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class _Slices:
    """What is hashed of the arena at `addr`: parts by themselves, and what is hashed as one."""

    addr: int
    flat: list[memoryview]
    groups: list[list[memoryview]]


@dataclass(frozen=True, slots=True, eq=False)
class Verifier:
    """Checks pieces of one plan that come from one source; made once per plan, for every version.

    `asks` are the digests that it needs, in the order in which the pieces want them: it is given their
    answers in one array, one after the other. `asked` says for each piece how many of them it needs.
    """

    plan: Plan
    needs: NeedTable
    merged: Merged
    first: int
    pieces: PieceTable
    asks: tuple[Selection, ...]
    asked: Int
    ask_start: Int
    parts: Parts
    base: Int
    flat: Flat
    groups: Groups
    strided: Bool
    _slices: list[_Slices] = field(default_factory=list, repr=False)

    @classmethod
    def of(
        cls,
        plan: Plan,
        needs: NeedTable,
        merged: Merged,
        pieces: slice,
        grid: DigestGrid,
        *,
        reads: Int | None = None,
        at_once: bool = False,
    ) -> Verifier:
        """Prepare to check the pieces at `pieces` of `plan`, whose source's shards are cut by `grid`.

        `reads`: the pieces with which reads begin, where pieces will be checked by whole reads only; then
        small ones are checked together. `at_once`: ask for all digests of the source in one, whether they
        are needed or not.
        """
        table = PieceTable(*(getattr(plan.pieces, name)[pieces] for name in PieceTable.__slots__))
        parts = best_parts(table, needs, merged, grid)
        contiguous = lies_contiguous(table, needs, parts)
        rows = merged.manifest_row[table.row]
        groups = Groups.none(len(table))
        if reads is not None:
            read = np.searchsorted(reads, np.arange(pieces.start, pieces.stop), side="right")
            groups = Groups.of(table, merged, parts, grid, contiguous, read)
        if at_once:
            asks, asked, base = whole_ask(rows, parts, grid)
        else:
            asks, asked, base = asks_of(table, *groups.asked(rows, parts), grid)
        sizes = [int(ask.counts(grid).sum()) for ask in asks]
        return cls(
            plan=plan,
            needs=needs,
            merged=merged,
            first=pieces.start,
            pieces=table,
            asks=asks,
            asked=asked,
            ask_start=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))]),
            parts=parts,
            base=base,
            flat=flatten(table, needs, merged, parts, base, contiguous & (groups.of_piece < 0)),
            groups=groups,
            strided=~contiguous & (parts.verified_bytes > 0),
        )

    @property
    def digest_count(self) -> int:
        """How many digests it needs in all."""
        return int(self.ask_start[-1])

    def asks_for(self, rows: Int | slice | None = None) -> int:
        """How many of `asks`, from the first, must be answered to check the pieces at `rows`."""
        return int(self.asked[self._own(rows)].max(initial=0))

    def coverage(self, rows: Int | slice | None = None) -> Verified:
        """What checking the pieces at `rows` of the plan covers (default all of this source)."""
        own = self._own(rows)
        verified = int(self.parts.verified_bytes[own].sum())
        return Verified(verified, int(self.pieces.size_bytes[own].sum()) - verified)

    def verify(self, arena: Bytes, digests: Bytes, rows: Int | slice | None = None) -> Verified:
        """Check the pieces at `rows` of the plan (default all), whose bytes have landed in `arena`.

        Raises:
            DigestMismatch: bytes differ from what was published; the message names tensor, source, box.
            UsageError: the arena is smaller than the needs' arena.
        """
        return self.compare(self.hash(arena, rows), digests)

    def hash(self, arena: Bytes, rows: Int | slice | None = None, beside: Sequence[Beside] = ()) -> Hashed:
        """Hash the pieces at `rows` of the plan (default all), whose bytes have landed in `arena`.

        Blocking and long; run it in a thread. It copies only parts that are not contiguous, a block at
        a time, and releases the GIL over big ones. What is to be done `beside`, in the order of what it
        reads in the arena, is done where those bytes have just been hashed, and are in the cache.

        Raises:
            UsageError: the arena is smaller than the needs' arena.
        """
        if arena.dtype != np.uint8 or arena.ndim != 1 or len(arena) < self.needs.arena_bytes:
            raise UsageError(
                f"arena: expected {self.needs.arena_bytes} flat bytes, got {arena.dtype} {arena.shape}"
            )
        own = self._own(rows)
        return Hashed(
            own,
            self._hash_flat(arena, own, beside),
            self._hash_groups(arena, own),
            [self._hash_strided(arena, piece) for piece in own[self.strided[own]].tolist()],
        )

    def compare(self, hashed: Hashed, digests: Bytes) -> Verified:
        """Compare what was hashed with what was published.

        Raises:
            DigestMismatch: as `verify`.
        """
        own = hashed.own
        owner, at = self._flat_of(own)
        self._compare(
            hashed.flat,
            digests[self.flat.digest[at]],
            lambda n: self._refuse(int(own[owner[n]]), int(at[n] - self.flat.start[own[owner[n]]])),
        )
        groups = self._groups_of(own)
        self._compare(
            hashed.groups,
            digests[self.base[self.groups.first[groups]]],
            lambda n: self._refuse_group(int(groups[n])),
        )
        for piece, found in zip(own[self.strided[own]].tolist(), hashed.strided, strict=True):
            self._compare(found, self._strided_of(piece, digests), partial(self._refuse, piece))
        return self.coverage(own + self.first)

    @staticmethod
    def _compare(found: bytes, expected: Bytes, refuse: Callable[[int], NoReturn]) -> None:
        if found != expected.tobytes():
            rows = np.frombuffer(found, np.uint8).reshape(-1, DIGEST_BYTES)
            refuse(int(np.argmax((rows != expected).any(axis=1))))

    def _own(self, rows: Int | slice | None) -> Int:
        if rows is None:
            return np.arange(len(self.pieces))
        if isinstance(rows, slice):
            return np.arange(rows.start - self.first, rows.stop - self.first)
        return rows - self.first

    def _flat_of(self, own: Int) -> tuple[Int, Int]:
        """(its place in `own`, number) of each flat part of some pieces."""
        start = self.flat.start
        return expand(start[own], start[own + 1] - start[own])

    def _hash_flat(self, arena: Bytes, own: Int, beside: Sequence[Beside]) -> bytes:
        _, at = self._flat_of(own)
        if not len(at):
            do_all(beside)
            return b""
        slices = self._slices_in(arena).flat
        first, last = int(at[0]), int(at[-1]) + 1
        chosen = slices[first:last] if last - first == len(at) else [slices[i] for i in at.tolist()]
        if beside:
            return hash_beside(chosen, self.flat.end[at].tolist(), beside)
        return b"".join(map(xxhash.xxh3_128_digest, chosen))

    def _groups_of(self, own: Int) -> Int:
        """The groups of some pieces.

        Raises:
            UsageError: a group is not there as a whole.
        """
        grouped = self.groups.of_piece[own]
        grouped = grouped[grouped >= 0]
        numbers: Int = np.unique(grouped)
        missing = np.diff(self.groups.start)[numbers].sum() - len(grouped)
        if missing:
            raise UsageError(f"{missing} pieces of groups that are read as one are not among those to verify")
        return numbers

    def _hash_groups(self, arena: Bytes, own: Int) -> bytes:
        numbers = self._groups_of(own).tolist()
        if not numbers:
            return b""
        slices = self._slices_in(arena).groups
        return b"".join([_digest_of_all(slices[number]) for number in numbers])

    def _slices_in(self, arena: Bytes) -> _Slices:
        """What is hashed where it lies; kept, for versions come to the same arena again and again."""
        addr = arena.ctypes.data
        if not self._slices or self._slices[0].addr != addr:
            memory, flat, groups = arena.data, self.flat, self.groups
            begin = self.pieces.local_offset[groups.piece].astype(np.int64)
            end = begin + self.pieces.size_bytes[groups.piece]
            self._slices[:] = [
                _Slices(
                    addr,
                    [memory[a:b] for a, b in zip(flat.begin.tolist(), flat.end.tolist(), strict=True)],
                    [_joined(memory, begin[a:b], end[a:b]) for a, b in pairwise(groups.start.tolist())],
                )
            ]
        return self._slices[0]

    def _hash_strided(self, arena: Bytes, piece: int) -> bytes:
        parts = self.parts
        need = int(self.pieces.need[piece])
        elsize = int(self.needs.elsize[need])
        width = parts.size.shape[1]
        shape = [1] * (width - self.needs.width) + self.needs.shape[need].tolist()
        at = int(self.needs.local_offset[need])
        box = as_box(arena[at : at + prod(shape) * elsize], shape, elsize)
        begin = self._corner(piece, parts.first[piece]) - widened(self.needs.offset[[need]], width, 0)[0]
        extent = parts.count[piece] * parts.size[piece]
        begin[-1] *= elsize
        extent[-1] *= elsize
        part = box[tuple(slice(a, a + n) for a, n in zip(begin.tolist(), extent.tolist(), strict=True))]
        return box_digests(part, parts.count[piece].tolist())

    def _strided_of(self, piece: int, digests: Bytes) -> Bytes:
        """The digests of a piece whose parts are not contiguous in the arena."""
        parts = self.parts
        base, along = int(self.base[piece]), parts.parts[piece].tolist()
        expected = digests[base : base + prod(along)].reshape(*along, DIGEST_BYTES)
        chosen = zip(parts.first[piece].tolist(), parts.count[piece].tolist(), strict=True)
        return expected[tuple(slice(a, a + n) for a, n in chosen)].reshape(-1, DIGEST_BYTES)

    def _corner(self, piece: int, index: Int) -> Int:
        """Global offset of a part of a piece's shard."""
        width = self.parts.size.shape[1]
        row = int(self.pieces.row[piece])
        out: Int = widened(self.merged.shards.offset[[row]], width, 0)[0] + index * self.parts.size[piece]
        return out

    def _refuse(self, piece: int, number: int) -> NoReturn:
        need = int(self.pieces.need[piece])
        rank = int(self.needs.rank[need])
        count = self.parts.count[piece].tolist()
        index = self.parts.first[piece] + np.array(np.unravel_index(number, count))
        offset = unpadded(self._corner(piece, index), rank)
        shape = unpadded(self.parts.size[piece], rank)
        source = self.merged.sources[int(self.pieces.source[piece])]
        raise DigestMismatch(
            f"tensor {self.needs.name(need)!r}: offset {offset} shape {shape} as read by {self.needs.owner} "
            f"is not what {source} published"
        )

    def _refuse_group(self, number: int) -> NoReturn:
        pieces = self.groups.piece[self.groups.start[number] : self.groups.start[number + 1]]
        names = [self.needs.name(int(self.pieces.need[piece])) for piece in (pieces[0], pieces[-1])]
        source = self.merged.sources[int(self.pieces.source[pieces[0]])]
        raise DigestMismatch(
            f"{len(pieces)} small tensors from {names[0]!r} to {names[1]!r}, as read by {self.needs.owner}: "
            f"one of them is not what {source} published"
        )


def _joined(memory: memoryview, begin: Int, end: Int) -> list[memoryview]:
    """The slices, those that touch as one."""
    first = np.flatnonzero(np.append(True, begin[1:] != end[:-1]))
    last = np.append(first[1:], len(end)) - 1
    return [memory[a:b] for a, b in zip(begin[first].tolist(), end[last].tolist(), strict=True)]


def _digest_of_all(slices: list[memoryview]) -> bytes:
    return xxhash.xxh3_128_digest(slices[0] if len(slices) == 1 else b"".join(slices))
