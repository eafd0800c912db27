"""The digests of one version's shards, level by level; what follows from structure is made once.

`ShardHasher` belongs to a structure (the same boxes in the same places), `ShardDigests` to a version.
Nothing here is locked: each part is to be hashed by one thread, and read by others when that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise

import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided

from modelexpress_rl.errors import ManifestError, StateError, UsageError
from modelexpress_rl.reshard.boxes import expand
from modelexpress_rl.reshard.digests import DEFAULT_RULE, GridRule, as_box, box_digests
from modelexpress_rl.reshard.geometry import DIGEST_BYTES, Bytes, Int, ShardTable
from modelexpress_rl.reshard.grid import GROUPS, LEVELS, SLABS, DigestGrid, Selection, digest_grid

UNIT_BYTES = 32 << 20

Memory = Callable[[int], Bytes]

_MAGIC = b"MXD2"


class ShardHasher:
    """Hashes shards of one table where they lie.

    `memory(row)` gives a row's bytes, flat. `fixed`: they are always the same memory, so that a view of
    each slab may be kept; else they are asked for anew each time (a copy of a GPU's memory).
    """

    def __init__(
        self, table: ShardTable, memory: Memory, *, fixed: bool, rule: GridRule = DEFAULT_RULE
    ) -> None:
        self.grid = digest_grid(table, rule)
        self.start = _starts(self.grid)
        self.units = _units(table.size_bytes)
        self._table = table
        self._memory = memory
        self._fixed = fixed
        self._slab_counts = self.grid.count[SLABS].tolist()
        self._sizes = table.size_bytes.tolist()
        self._slabs = [self._slabs_of(row) for row in range(len(table))] if fixed else None
        self._groups = dict(
            zip(self.grid.group_row.tolist(), pairwise(self.grid.group_start.tolist()), strict=True)
        )
        self._joined = {row: self._bytes_of(row) for row in self._groups} if fixed else None

    def hash_slabs(self, unit: int, out: ShardDigests, stopped: Callable[[], bool]) -> None:
        """Hash the slabs of the rows of one unit; blocking, and without the GIL over big ones.

        With them the groups whose digests belong to these rows.

        Raises:
            StateError: `stopped` says so, between two rows.
        """
        rows = self.units[unit]
        self._hash_slabs(rows, out, stopped)
        for row in rows:
            if row in self._groups:
                _go_on(stopped)
                joined = self._bytes_of(row) if self._joined is None else self._joined[row]
                whole = joined[0] if len(joined) == 1 else b"".join(joined)
                out.put(GROUPS, range(row, row + 1), xxhash.xxh3_128_digest(whole))

    def _hash_slabs(self, rows: range, out: ShardDigests, stopped: Callable[[], bool]) -> None:
        if self._slabs is not None and rows.stop - rows.start > 1:
            _go_on(stopped)
            together = chain.from_iterable(self._slabs[rows.start : rows.stop])
            out.put(SLABS, rows, b"".join(map(xxhash.xxh3_128_digest, together)))
            return
        for row in rows:
            _go_on(stopped)
            slabs = self._slabs_of(row) if self._slabs is None else self._slabs[row]
            out.put(SLABS, range(row, row + 1), b"".join(map(xxhash.xxh3_128_digest, slabs)))

    def hash_parts(
        self, level: int, rows: Sequence[int], out: ShardDigests, stopped: Callable[[], bool]
    ) -> None:
        """Hash a finer level of some rows whose slabs are hashed, and see whether these are the same.

        Raises:
            StateError: the bytes are not what they were when their slabs were hashed; it names the
                tensor. Or `stopped` says so, between two rows.
        """
        for row in rows:
            _go_on(stopped)
            found = self._parts_of(level, row, out.get(SLABS, row))
            out.put(level, range(row, row + 1), found)

    def _parts_of(self, level: int, row: int, slabs_before: Bytes) -> bytes:
        table, data = self._table, self._memory(row)
        self._check(row, data)
        elsize = int(table.tensors.elsize[table.tensor[row]])
        box = as_box(data, table.shape[row].tolist(), elsize)
        parts, slab_parts = self.grid.parts[level, row], self.grid.parts[SLABS, row]
        axis = int(np.argmax(slab_parts > 1))
        inside = parts.copy()
        inside[axis] //= slab_parts[axis]
        found = []
        # Slab by slab: its parts are cut from what the check has just brought into the cache.
        for number, slab in enumerate(np.split(box, int(slab_parts[axis]), axis=axis)):
            if xxhash.xxh3_128_digest(slab.data) != slabs_before[number].tobytes():
                self._refuse(row, number)
            found.append(box_digests(slab, inside.tolist()))
        return b"".join(found)

    def _slabs_of(self, row: int) -> list[memoryview]:
        count, size = self._slab_counts[row], self._sizes[row]
        if not count:
            return []
        data = self._memory(row)
        self._check(row, data)
        if count == 1:
            return [data.data]
        step = size // count
        return [data.data[at : at + step] for at in range(0, size, step)]

    def _bytes_of(self, group_row: int) -> list[memoryview]:
        """The bytes of a group where they lie: in one piece, where its shards touch."""
        begin, end = self._groups[group_row]
        rows = self.grid.members[begin:end].tolist()
        members = [self._memory(row) for row in rows]
        for row, data in zip(rows, members, strict=True):
            self._check(row, data)
        if not self._fixed:
            return [data.data for data in members]
        ends = [data.ctypes.data + len(data) for data in members]
        if any(data.ctypes.data != before for before, data in zip(ends, members[1:], strict=False)):
            return [data.data for data in members]
        return [as_strided(members[0], (ends[-1] - members[0].ctypes.data,), writeable=False).data]

    def _check(self, row: int, data: Bytes) -> None:
        if data.dtype != np.uint8 or data.shape != (self._sizes[row],):
            raise UsageError(
                f"tensor {self._name(row)!r}: expected {self._sizes[row]} flat bytes, got {data.dtype} "
                f"{data.shape}"
            )

    def _refuse(self, row: int, slab: int) -> None:
        offset, shape = self._table.box(row)
        raise StateError(
            f"tensor {self._name(row)!r}, offset {offset} shape {shape}: its bytes changed after they were "
            f"captured (part {slab} of {self._slab_counts[row]}), while readers may read them"
        )

    def _name(self, row: int) -> str:
        return self._table.tensors.names[int(self._table.tensor[row])]


class ShardDigests:
    """The digests of one version, as far as they are made."""

    def __init__(self, hasher: ShardHasher) -> None:
        self._grid = hasher.grid
        self._start = hasher.start
        self._all = np.zeros((int(hasher.start[-1, -1]), DIGEST_BYTES), np.uint8)

    def put(self, level: int, rows: range, digests: bytes) -> None:
        """Keep the digests of some rows that follow each other."""
        begin, end = self._start[level, rows.start], self._start[level, rows.stop]
        self._all[begin:end] = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)

    def get(self, level: int, row: int) -> Bytes:
        """The digests of one row."""
        return self._all[self._start[level, row] : self._start[level, row + 1]]

    def gather(self, selection: Selection) -> Bytes:
        """The digests that are asked for, in the order of an answer."""
        begin = self._start[:, :-1][:, selection.rows].T
        _, index = expand(begin.reshape(-1), selection.counts(self._grid).reshape(-1))
        return self._all[index]


def encode_answer(digests: Bytes, selection: Selection, manifest_digest: str) -> bytes:
    """Write the digests of a selection, bound to it and to the manifest whose sha256 is given."""
    body = b"".join([_MAGIC, bytes.fromhex(manifest_digest), selection.name, digests.tobytes()])
    return body + xxhash.xxh3_128_digest(body)


def is_answer(data: bytes) -> bool:
    """Whether these are digests of a selection, not a whole table of a publisher that knows none."""
    return data[: len(_MAGIC)] == _MAGIC


def decode_answer(data: bytes, selection: Selection, grid: DigestGrid, manifest_digest: str) -> Bytes:
    """Read the digests of a selection of the manifest whose sha256 is `manifest_digest`.

    Raises:
        ManifestError: they are damaged, of another manifest, or of another selection.
    """
    head = _MAGIC + bytes.fromhex(manifest_digest) + selection.name
    count = int(selection.counts(grid).sum())
    if len(data) != len(head) + (count + 1) * DIGEST_BYTES:
        raise ManifestError(f"digests: expected {count} of them, got {len(data)} bytes")
    if data[: len(head)] != head:
        raise ManifestError(f"digests: not those that were asked for of manifest {manifest_digest}")
    if xxhash.xxh3_128_digest(memoryview(data)[:-DIGEST_BYTES]) != data[-DIGEST_BYTES:]:
        raise ManifestError("digests: damaged on the way: their own checksum differs")
    return np.frombuffer(data, np.uint8, count * DIGEST_BYTES, len(head)).reshape(-1, DIGEST_BYTES)


def _go_on(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise StateError("the publication has ended")


def _starts(grid: DigestGrid) -> Int:
    """Where the digests of each row of each level begin, in one array; one more column than rows."""
    rows = grid.count.shape[1]
    start = np.zeros((LEVELS, rows + 1), np.int64)
    np.cumsum(grid.count, axis=1, out=start[:, 1:])
    start[1:] += np.cumsum(start[:-1, -1])[:, None]
    return start


def _units(size_bytes: Int) -> tuple[range, ...]:
    """Rows that follow each other, of about `UNIT_BYTES` together; a bigger row is a unit of its own."""
    ends = np.cumsum(size_bytes)
    units, begin = [], 0
    while begin < len(ends):
        done = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + UNIT_BYTES, side="right")))
        units.append(range(begin, end))
        begin = end
    return tuple(units)
