"""Digests of shards in a grid of tiles, so that a reader of a part can check that part.

A shard is cut along every axis into 1, 2, 4, ... equal parts (`tile_parts`). There are two levels:
*bands* are cut along all axes but the last and lie contiguous in a row-major shard of up to two axes;
*tiles* are cut along the last axis too, for readers of column slices. Each digest is xxh3_128 over
the row-major bytes of its band or tile. A shard's digests lie in one run: its bands, then (where the
last axis is cut) its tiles, both in row-major order; an empty shard has none.

xxh3 finds accidents (torn, stale, misplaced, flipped bytes), not forgers; manifests are bound by sha256.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np
import xxhash

from modelexpress_rl.errors import ManifestError, UsageError
from modelexpress_rl.reshard.geometry import DIGEST_BYTES, Bytes, Int, ShardTable, volumes

BLOCK_BYTES = 512 << 10  # what is copied and hashed at a time; two of them fit an L2 cache

_MAGIC = b"MXD1"
_HEADER = struct.Struct("<4sIIII32sQQ")


@dataclass(frozen=True, slots=True)
class GridRule:
    """How finely shards are cut: up to `coarse_parts` an axis, up to `fine_parts` where tiles are big.

    Along every axis the parts double while they divide the extent, up to `coarse_parts` as long as a
    tile keeps `min_tile_bytes`, then up to `fine_parts` as long as it keeps `fine_tile_bytes`.
    """

    min_tile_bytes: int = 512
    coarse_parts: int = 8
    fine_tile_bytes: int = 64 << 10
    fine_parts: int = 32

    def __post_init__(self) -> None:
        if not (16 <= self.min_tile_bytes <= self.fine_tile_bytes <= 1 << 31):
            raise UsageError(
                f"GridRule: tile sizes {self.min_tile_bytes}, {self.fine_tile_bytes} are out of range"
            )
        if not (1 <= self.coarse_parts <= self.fine_parts <= 64):
            raise UsageError(f"GridRule: parts {self.coarse_parts}, {self.fine_parts} are out of range")


DEFAULT_RULE = GridRule()


@dataclass(frozen=True, slots=True, eq=False)
class DigestTable:
    """Digests of all shards of one manifest: those of row i are `digests[start[i] : start[i + 1]]`."""

    rule: GridRule
    parts: Int
    start: Int
    digests: Bytes


def tile_parts(shape: Int, elsize: Int, rule: GridRule = DEFAULT_RULE) -> Int:
    """Parts along each axis for boxes of these shapes (both (boxes, width), padded in front)."""
    parts = np.ones_like(shape)
    tile_bytes = volumes(shape) * elsize

    def double(axis: int, at_most: int, keep_bytes: int) -> None:
        twice = parts[:, axis] * 2
        fits = (twice <= at_most) & (shape[:, axis] % twice == 0) & (tile_bytes // 2 >= keep_bytes)
        parts[fits, axis] *= 2
        tile_bytes[fits] //= 2

    for axis in range(shape.shape[1]):
        for _ in range(rule.coarse_parts.bit_length() - 1):
            double(axis, rule.coarse_parts, rule.min_tile_bytes)
    for _ in range(rule.fine_parts.bit_length() - 1):
        for axis in range(shape.shape[1]):
            double(axis, rule.fine_parts, rule.fine_tile_bytes)
    return parts


def band_counts(parts: Int) -> Int:
    """Bands of each shard."""
    return volumes(parts[:, :-1])


def digest_starts(table: ShardTable, parts: Int) -> Int:
    """Where each row's digests begin; one more entry than rows."""
    bands = band_counts(parts)
    counts = bands + np.where(parts[:, -1] > 1, volumes(parts), 0)
    counts[volumes(table.shape) == 0] = 0
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def digest_table(
    table: ShardTable,
    memory: Callable[[int], Bytes],
    *,
    rule: GridRule = DEFAULT_RULE,
    threads: int = 1,
) -> DigestTable:
    """Hash every shard of a manifest; `memory(row)` gives the row's bytes, flat, where they lie.

    Reads each byte once and releases the GIL while it hashes or copies; run it off the event loop.

    Raises:
        UsageError: `memory` gave another number of bytes than the shard has; the message names it.
    """
    elsize = table.tensors.elsize[table.tensor]
    parts = tile_parts(table.shape, elsize, rule)
    start = digest_starts(table, parts)
    out = np.zeros((int(start[-1]), DIGEST_BYTES), np.uint8)
    flat_out = out.reshape(-1)
    sizes, shapes, elsizes = table.size_bytes.tolist(), table.shape.tolist(), elsize.tolist()
    starts, all_parts = (start * DIGEST_BYTES).tolist(), parts.tolist()

    def hash_row(row: int) -> None:
        if not sizes[row]:
            return
        data = memory(row)
        if data.dtype != np.uint8 or data.shape != (sizes[row],):
            name = table.tensors.names[int(table.tensor[row])]
            raise UsageError(
                f"tensor {name!r}: expected {sizes[row]} flat bytes, got {data.dtype} {data.shape}"
            )
        found = shard_digests(as_box(data, shapes[row], elsizes[row]), all_parts[row])
        flat_out[starts[row] : starts[row + 1]] = np.frombuffer(found, np.uint8)

    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(hash_row, range(len(table))):
                pass
    else:
        for row in range(len(table)):
            hash_row(row)
    return DigestTable(rule, parts, start, out)


def as_box(data: Bytes, shape: list[int], elsize: int) -> Bytes:
    """Flat bytes as a row-major box, the last axis counted in bytes; never a copy."""
    return data.reshape(*shape[:-1], shape[-1] * elsize)


def shard_digests(box: Bytes, parts: list[int]) -> bytes:
    """Digests of a contiguous shard: its bands, then its tiles where the last axis is cut."""
    if parts[-1] == 1:
        return box_digests(box, parts)
    bands: list[bytes] = []
    tiles: list[bytes] = []
    for band in _bands(box, parts):
        if band.nbytes <= BLOCK_BYTES:
            bands.append(xxhash.xxh3_128_digest(np.ascontiguousarray(band).data))
            tiles += _small_digests(band, [1] * (band.ndim - 1) + parts[-1:])
            continue
        whole = xxhash.xxh3_128()
        cut = [xxhash.xxh3_128() for _ in range(parts[-1])]
        for block in _row_blocks(band):
            whole.update(np.ascontiguousarray(block).data)
            for column, part in zip(cut, _columns(block, parts[-1]), strict=True):
                column.update(part.data)
        bands.append(whole.digest())
        tiles += [column.digest() for column in cut]
    return b"".join([*bands, *tiles])


def box_digests(box: Bytes, parts: list[int]) -> bytes:
    """Digests of the tiles of a box cut into `parts`, joined in row-major order.

    The box may be a strided view as long as its last axis is contiguous. Contiguous tiles are hashed
    where they lie, others through a copy of a block at a time.
    """
    if box.nbytes <= BLOCK_BYTES:
        return b"".join(_small_digests(box, parts))
    found: list[bytes] = []
    for band in _bands(box, parts):
        if parts[-1] == 1 and band.flags.c_contiguous:
            found.append(xxhash.xxh3_128_digest(band.data))
            continue
        if band.nbytes <= BLOCK_BYTES:
            found += _small_digests(band, [1] * (band.ndim - 1) + parts[-1:])
            continue
        cut = [xxhash.xxh3_128() for _ in range(parts[-1])]
        for block in _row_blocks(band):
            for column, part in zip(cut, _columns(block, parts[-1]), strict=True):
                column.update(part.data)
        found += [column.digest() for column in cut]
    return b"".join(found)


def _small_digests(box: Bytes, parts: list[int]) -> list[bytes]:
    """Digests of the tiles of a box that is copied at once: tile after tile, each contiguous."""
    inside = [extent // count for extent, count in zip(box.shape, parts, strict=True)]
    cut = box.reshape([side for pair in zip(parts, inside, strict=True) for side in pair])
    axes = range(0, cut.ndim, 2)
    tiles = np.ascontiguousarray(cut.transpose(*axes, *(axis + 1 for axis in axes))).reshape(-1).data
    step = prod(inside)
    return [xxhash.xxh3_128_digest(tiles[at : at + step]) for at in range(0, len(tiles), step)]


def _bands(box: Bytes, parts: list[int]) -> Iterator[Bytes]:
    if prod(parts[:-1]) == 1:
        yield box
        return
    steps = [extent // count for extent, count in zip(box.shape, parts, strict=True)][:-1]
    for index in np.ndindex(*parts[:-1]):
        yield box[tuple(slice(i * step, (i + 1) * step) for i, step in zip(index, steps, strict=True))]


def _row_blocks(band: Bytes) -> Iterator[Bytes]:
    """The rows of a box in order, as two-dimensional blocks of about `BLOCK_BYTES`."""
    if band.ndim == 1:
        yield band.reshape(1, -1)
        return
    if band.ndim > 2 and band.shape[0] == 1:
        yield from _row_blocks(band[0])
        return
    slab_bytes = prod(band.shape[1:])
    if band.ndim > 2 and slab_bytes >= BLOCK_BYTES:
        for slab in band:
            yield from _row_blocks(slab)
        return
    step = max(1, BLOCK_BYTES // slab_bytes)
    for begin in range(0, band.shape[0], step):
        yield band[begin : begin + step].reshape(-1, band.shape[-1])  # copies where strides demand it


def _columns(block: Bytes, count: int) -> Bytes:
    """Cut rows into `count` column parts, each contiguous: (count, rows, bytes)."""
    rows, row_bytes = block.shape
    return np.ascontiguousarray(block.reshape(rows, count, row_bytes // count).transpose(1, 0, 2))


def encode_digests(table: DigestTable, manifest_digest: str) -> bytes:
    """Write a digest table for the manifest whose sha256 is `manifest_digest`."""
    rule = table.rule
    header = _HEADER.pack(
        _MAGIC,
        rule.min_tile_bytes,
        rule.coarse_parts,
        rule.fine_tile_bytes,
        rule.fine_parts,
        bytes.fromhex(manifest_digest),
        len(table.start) - 1,
        len(table.digests),
    )
    body = header + table.digests.tobytes()
    return body + xxhash.xxh3_128_digest(body)


def decode_digests(data: bytes, table: ShardTable, manifest_digest: str) -> DigestTable:
    """Read the digests of the manifest whose table is `table` and whose sha256 is `manifest_digest`.

    Raises:
        ManifestError: they are damaged, of another manifest, or of another shape.
    """
    if len(data) < _HEADER.size + DIGEST_BYTES:
        raise ManifestError(f"digests: {len(data)} bytes are too few")
    magic, min_tile, coarse, fine_tile, fine, bound_to, rows, count = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ManifestError(f"digests: expected to begin with {_MAGIC!r}, got {magic!r}")
    if bound_to.hex() != manifest_digest:
        raise ManifestError(f"digests: made for manifest {bound_to.hex()}, expected {manifest_digest}")
    if len(data) != _HEADER.size + count * DIGEST_BYTES + DIGEST_BYTES:
        raise ManifestError(f"digests: {count} digests don't take {len(data)} bytes")
    if xxhash.xxh3_128_digest(memoryview(data)[:-DIGEST_BYTES]) != data[-DIGEST_BYTES:]:
        raise ManifestError("digests: damaged on the way: their own checksum differs")
    try:
        rule = GridRule(min_tile, coarse, fine_tile, fine)
    except UsageError as error:
        raise ManifestError(f"digests: {error}") from error
    parts = tile_parts(table.shape, table.tensors.elsize[table.tensor], rule)
    start = digest_starts(table, parts)
    if rows != len(table) or count != start[-1]:
        raise ManifestError(
            f"digests: {count} for {rows} shards, the manifest has {len(table)} shards of {start[-1]} digests"
        )
    body = np.frombuffer(data, np.uint8, count * DIGEST_BYTES, _HEADER.size)
    return DigestTable(rule, parts, start, body.reshape(-1, DIGEST_BYTES))
