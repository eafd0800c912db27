"""One chunk of a sparse delta: how it is encoded, and how it is put onto a base.

The kind of a chunk is the one that is estimated to be smallest: nothing where nothing changed; the
positions of the words that changed (as gaps, in the narrowest width that holds the widest) and their XOR,
as separate planes; the XOR of all words as planes; or the new words themselves. All but the last are XOR,
so that any number of them can be joined before the base is touched.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash

from modelexpress_rl.canonical import planes
from modelexpress_rl.canonical.memory import Words
from modelexpress_rl.errors import ObjectError

_SURELY_SPARSE = 16  # where at most every 16th word changed, nothing beats positions
_FEW_GROUPS = 0.05  # of eight words, for each word: about where one of 16 changed
_local = threading.local()
_RAW_SHARE = 0.97  # of the plain words: an XOR that is hardly smaller isn't worth decoding


class Kind(IntEnum):
    """What a chunk's payload is."""

    UNCHANGED = 0
    SPARSE = 1
    DENSE = 2
    PLAIN = 3


@dataclass(frozen=True, slots=True)
class Chunk:
    """An encoded chunk; the digests are xxh3-128 of all its words before and after."""

    kind: Kind
    changed: int
    gap_bytes: int
    payload: bytes
    base_digest: bytes
    result_digest: bytes


def digest(words: Words) -> bytes:
    """xxh3-128 of contiguous words."""
    return bytes(xxhash.xxh3_128_digest(words.data))


def encode(base: Words, new: Words) -> Chunk:
    """The change from one to the other, which are contiguous, and of one length and type."""
    base_digest, result_digest = digest(base), digest(new)
    if base_digest == result_digest:
        return Chunk(Kind.UNCHANGED, 0, 0, b"", base_digest, result_digest)
    differs = np.not_equal(base, new, out=_scratch(base.size))
    hit = _groups(differs)
    if hit.size <= _FEW_GROUPS * base.size:
        at = _inside(differs, hit)
        return _sparse(at, base.take(at) ^ new.take(at), base_digest, result_digest)
    return _smallest(base ^ new, int(np.count_nonzero(differs)), new, base_digest, result_digest)


def encode_change(change: Words, base_digest: bytes, result_digest: bytes) -> Chunk:
    """The chunk of a known XOR between two contents whose digests are known."""
    changed = int(np.count_nonzero(change))
    if not changed:
        return Chunk(Kind.UNCHANGED, 0, 0, b"", base_digest, result_digest)
    return _smallest(change, changed, None, base_digest, result_digest)


def encode_plain(new: Words, base_digest: bytes, result_digest: bytes) -> Chunk:
    """The chunk that sets all words, whatever was there."""
    return Chunk(Kind.PLAIN, new.size, 0, new.tobytes(), base_digest, result_digest)


def positions(differs: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Where it is true, in order.

    In two steps, since most groups of eight have nothing in them: twice as fast as looking at each one.
    """
    return _inside(differs, _groups(differs))


def put_onto(chunk: Chunk, words: Words, where: str) -> bool:
    """Apply a chunk to its base's words, in place; true where it set them all, whatever was there.

    Raises:
        ObjectError: the payload is malformed; nothing was changed then.
    """
    if chunk.kind is Kind.UNCHANGED:
        if chunk.payload:
            raise ObjectError(f"{where}: unchanged, but has {len(chunk.payload)} bytes")
        return False
    if chunk.kind is Kind.PLAIN:
        if len(chunk.payload) != words.nbytes:
            raise ObjectError(f"{where}: expected {words.nbytes} bytes, got {len(chunk.payload)}")
        words[:] = np.frombuffer(chunk.payload, words.dtype)
        return True
    size = words.dtype.itemsize
    payload = memoryview(chunk.payload)
    if chunk.kind is Kind.DENSE:
        words ^= planes.join(planes.unpack(payload, [words.size] * size, where), words.dtype)
        return False
    if not 0 < chunk.changed <= words.size or chunk.gap_bytes not in (1, 2, 4):
        raise ObjectError(
            f"{where}: expected at most {words.size} changes with gaps of 1, 2 or 4 bytes, "
            f"got {chunk.changed} with {chunk.gap_bytes}"
        )
    parts = planes.unpack(payload, [chunk.changed] * (chunk.gap_bytes + size), where)
    gaps = planes.join(parts[: chunk.gap_bytes], np.dtype(f"<u{chunk.gap_bytes}"))
    at = np.cumsum(gaps, dtype=np.int64)
    at += np.arange(chunk.changed)
    if at[-1] >= words.size:
        raise ObjectError(f"{where}: expected positions below {words.size}, got {at[-1]}")
    words[at] ^= planes.join(parts[chunk.gap_bytes :], words.dtype)
    return False


def _scratch(size: int) -> npt.NDArray[np.bool_]:
    """Memory of this thread, used again and again: fresh memory costs a page fault for each 4 KiB."""
    held: npt.NDArray[np.bool_] | None = getattr(_local, "scratch", None)
    if held is None or held.size < size:
        held = _local.scratch = np.empty(size, np.bool_)
    return held[:size]


def _groups(differs: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    return np.flatnonzero(differs[: differs.size & ~7].view(np.uint64) != 0)


def _inside(differs: npt.NDArray[np.bool_], hit: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    whole = differs.size & ~7
    inside = np.flatnonzero(differs[:whole].view(np.uint64).take(hit).view(np.bool_))
    at: npt.NDArray[np.intp] = (hit.take(inside >> 3) << 3) + (inside & 7)
    rest = np.flatnonzero(differs[whole:])
    return np.concatenate((at, rest + whole)) if rest.size else at


def _sparse(at: npt.NDArray[np.intp], values: Words, base_digest: bytes, result_digest: bytes) -> Chunk:
    gaps = np.empty(at.size, np.int64)
    gaps[0] = at[0]
    np.subtract(at[1:], at[:-1], out=gaps[1:])
    gaps[1:] -= 1
    widest = int(gaps.max())
    gap_bytes = 1 if widest < 1 << 8 else 2 if widest < 1 << 16 else 4
    parts = planes.split(gaps.astype(f"<u{gap_bytes}")) + planes.split(values)
    return Chunk(
        Kind.SPARSE, at.size, gap_bytes, planes.pack(parts, sampled=False), base_digest, result_digest
    )


def _smallest(
    change: Words, changed: int, new: Words | None, base_digest: bytes, result_digest: bytes
) -> Chunk:
    """Positions, or all words' XOR, or the new words themselves (where they are known)."""
    at = None
    if changed * _SURELY_SPARSE > change.size:
        sample = change[:: max(1, change.size // 4096)]
        dense_bits = change.size * sum(map(planes.entropy_bits, planes.split(sample)))
        value_bits = sum(map(planes.entropy_bits, planes.split(sample[sample != 0])))
        if _position_bits(changed, change.size) + changed * value_bits >= dense_bits:
            payload = planes.pack(planes.split(change))
            if new is not None and len(payload) > _RAW_SHARE * new.nbytes:
                return encode_plain(new, base_digest, result_digest)
            return Chunk(Kind.DENSE, changed, 0, payload, base_digest, result_digest)
    at = positions(change != 0)
    return _sparse(at, change.take(at), base_digest, result_digest)


def _position_bits(changed: int, of: int) -> float:
    """What the positions of so many changes take; gaps are coded in bytes, so at least a bit for each."""
    share = changed / of
    rest = 1 - share
    exact = -of * (share * math.log2(share) + (rest * math.log2(rest) if rest else 0.0))
    return max(exact, float(changed)) * 1.05
