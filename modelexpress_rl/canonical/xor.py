"""0.7.0's delta of one tensor: a zstd frame of the bytewise XOR of old and new, and adler32 of the new bytes.

Everything goes block by block, so that neither a whole XOR nor a whole frame is in memory. Deltas that
follow each other are applied in one pass, however many they are: XOR commutes, and a block of the base is
touched once.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, cast

import numpy as np
import zstandard

from modelexpress_rl.canonical.memory import Bytes, same_size
from modelexpress_rl.canonical.objects import ObjectReader, RangeFile, read_range
from modelexpress_rl.errors import DigestMismatch, ObjectError, UsageError

BLOCK_BYTES = 1 << 20
LEVEL = 1
# What a frame may make its reader allocate: level 1 asks for 512 KiB, none below 20 for more than this.
_MAX_WINDOW_BYTES = 8 << 20
_ADLER = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the delta of a tensor lies, and the checksum of the bytes that it leads to."""

    source: ObjectReader
    begin: int
    end: int
    checksum: str


class XorEncoder:
    """The delta of one tensor: iterate `parts`, then read `checksum` and `changed_bytes`.

    Raises:
        UsageError: base and new differ in size.
    """

    def __init__(self, name: str, base: Bytes, new: Bytes) -> None:
        same_size(base, new, name, "the new one")
        self._base = base
        self._new = new
        self._adler = 1
        self.changed_bytes = 0

    @property
    def checksum(self) -> str:
        """8 hex digits, adler32 of the new bytes; complete when the parts are."""
        return f"{self._adler:08x}"

    def unchanged(self) -> bool:
        """Whether there is nothing to store; stops at the first byte that differs."""
        blocks = range(0, self._base.nbytes, BLOCK_BYTES)
        return all(
            np.array_equal(self._base[at : at + BLOCK_BYTES], self._new[at : at + BLOCK_BYTES])
            for at in blocks
        )

    def parts(self) -> Iterator[bytes]:
        """The frame, as it comes out of the compressor."""
        stream = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=self._base.nbytes)
        scratch = np.empty(min(BLOCK_BYTES, self._base.nbytes), np.uint8)
        for at in range(0, self._base.nbytes, BLOCK_BYTES):
            new = self._new[at : at + BLOCK_BYTES]
            delta = np.bitwise_xor(self._base[at : at + BLOCK_BYTES], new, out=scratch[: new.nbytes])
            self.changed_bytes += int(np.count_nonzero(delta))
            self._adler = zlib.adler32(new.data, self._adler)
            if part := stream.compress(delta.data):
                yield part
        yield stream.flush()


def replay(name: str, base: Bytes, frames: Sequence[Frame], out: Bytes) -> None:
    """Apply deltas that follow each other to a tensor, in one pass; `out` may be the base itself.

    The result is checked against the last frame's checksum; the memory beside base and `out` is a few MiB
    for each frame. Where it raises, `out` holds nothing of use.

    Raises:
        ObjectError: a frame is no zstd frame of exactly this tensor's size.
        DigestMismatch: the result is not what was published: another base, or a byte that was changed.
        UsageError: base and `out` differ in size, or there are no frames.
    """
    same_size(base, out, name, "what it is written to")
    if not frames:
        raise UsageError(f"tensor {name!r}: no delta to apply")
    streams = [_Stream(frame, f"tensor {name!r}", base.nbytes) for frame in frames]
    scratch = bytearray(min(BLOCK_BYTES, base.nbytes))
    adler = 1
    for at in range(0, base.nbytes, BLOCK_BYTES):
        block = out[at : at + BLOCK_BYTES]
        block[:] = base[at : at + BLOCK_BYTES]
        view = memoryview(scratch)[: block.nbytes]
        for stream in streams:
            stream.fill(view)
            np.bitwise_xor(block, np.frombuffer(view, np.uint8), out=block)
        adler = zlib.adler32(block.data, adler)
    for stream in streams:
        stream.finish()
    check_adler(name, adler, frames[-1])


def check_adler(name: str, adler: int, frame: Frame) -> None:
    """That the bytes of a tensor have the checksum that a file states.

    Raises:
        DigestMismatch: they have another.
    """
    if f"{adler:08x}" != frame.checksum:
        raise DigestMismatch(
            f"tensor {name!r} after {frame.source.name}: expected adler32 {frame.checksum}, got {adler:08x}"
        )


def is_adler(text: str | None) -> bool:
    """Whether a text is a checksum as files state it."""
    return text is not None and _ADLER.fullmatch(text) is not None


class _Stream:
    """A frame that is decompressed as far as it is asked for, and no further than its tensor's size."""

    def __init__(self, frame: Frame, what: str, size_bytes: int) -> None:
        self._where = f"{frame.source.name}: {what}"
        self._size_bytes = size_bytes
        self._got = 0
        head = read_range(frame.source, frame.begin, min(frame.end, frame.begin + 18), what)
        try:
            stated = zstandard.get_frame_parameters(head).content_size
        except zstandard.ZstdError as error:
            raise ObjectError(f"{self._where}: no zstd frame: {error}") from error
        if stated not in (zstandard.CONTENTSIZE_UNKNOWN, size_bytes):
            raise ObjectError(f"{self._where}: expected a frame of {size_bytes} bytes, it states {stated}")
        self._reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(
            cast("IO[bytes]", RangeFile(frame.source, frame.begin, frame.end, what)), read_size=256 << 10
        )

    def fill(self, view: memoryview) -> None:
        """The next bytes of the XOR."""
        begin = 0
        while begin < len(view):
            count = self._read(view[begin:])
            if not count:
                raise ObjectError(
                    f"{self._where}: expected a frame of {self._size_bytes} bytes, it ends after {self._got}"
                )
            begin += count

    def finish(self) -> None:
        """That nothing follows."""
        if self._read(memoryview(bytearray(1))):
            raise ObjectError(f"{self._where}: expected a frame of {self._size_bytes} bytes, it has more")

    def _read(self, view: memoryview) -> int:
        try:
            count = self._reader.readinto(view)
        except zstandard.ZstdError as error:
            raise ObjectError(
                f"{self._where}: the frame breaks off after {self._got} bytes: {error}"
            ) from error
        self._got += count
        return int(count)
