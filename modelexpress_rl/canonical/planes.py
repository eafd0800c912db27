"""Words as planes of bytes, each compressed by itself: the high bytes of small values are mostly alike."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence

import numpy as np
import zstandard

from modelexpress_rl.canonical.memory import Bytes, Words
from modelexpress_rl.errors import ObjectError

RAW, ZSTD, CONSTANT = range(3)
_SIZE_BITS = 30
_SAMPLES = 4096
_INCOMPRESSIBLE_BITS = 7.8  # of 8 for each byte: what is gained above isn't worth its time
_TRY_BYTES = 64
_local = threading.local()


def split(words: Words) -> list[Bytes]:
    """The lowest bytes of all words, then the next."""
    size = words.dtype.itemsize
    return [(words if not plane else words >> (8 * plane)).astype(np.uint8) for plane in range(size)]


def join(planes: Sequence[Bytes], dtype: np.dtype[np.unsignedinteger]) -> Words:
    """What `split` made planes of; `dtype` is the words'."""
    words: Words = planes[0].astype(dtype)
    for number, plane in enumerate(planes[1:], 1):
        words |= plane.astype(dtype) << dtype.type(8 * number)
    return words


def entropy_bits(data: Bytes) -> float:
    """About how many bits a byte needs where each is coded by itself, from a sample."""
    sample = data[:: max(1, data.size // _SAMPLES)]
    if not sample.size:
        return 0.0
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / sample.size
    return float(-(shares * np.log2(shares)).sum())


def pack(planes: Sequence[Bytes], *, sampled: bool = True) -> bytes:
    """Planes as one piece: for each its size and how it is stored, then what is stored.

    With `sampled` the compressor isn't tried on planes that look like noise; small ones aren't worth a look.
    """
    heads, bodies = [], []
    for plane in planes:
        how, body = _stored(plane, sampled)
        heads.append(how << _SIZE_BITS | len(body))
        bodies.append(body)
    return b"".join((struct.pack(f"<{len(heads)}I", *heads), *bodies))


def unpack(data: memoryview, sizes: Sequence[int], where: str) -> list[Bytes]:
    """What `pack` made; `sizes` are the planes' in bytes. Nothing larger is ever allocated.

    Raises:
        ObjectError: it is something else; begins with `where`.
    """
    at = 4 * len(sizes)
    if len(data) < at:
        raise ObjectError(f"{where}: expected the heads of {len(sizes)} planes, got {len(data)} bytes")
    planes = []
    for number, (head, size) in enumerate(
        zip(struct.unpack(f"<{len(sizes)}I", data[:at]), sizes, strict=True)
    ):
        length = head & ((1 << _SIZE_BITS) - 1)
        if length > len(data) - at:
            raise ObjectError(f"{where}: plane {number}: expected {length} bytes, got {len(data) - at}")
        planes.append(_restored(head >> _SIZE_BITS, data[at : at + length], size, f"{where}: plane {number}"))
        at += length
    if at != len(data):
        raise ObjectError(f"{where}: {len(data) - at} bytes behind the last plane")
    return planes


def _compressor() -> zstandard.ZstdCompressor:
    """One for each thread. Few matches: what these bytes have is a skewed distribution, and runs."""
    if not hasattr(_local, "compressor"):
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1, min_match=7, hash_log=6, write_content_size=False, write_checksum=False
        )
        _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _stored(plane: Bytes, sampled: bool) -> tuple[int, bytes]:
    if plane.size and plane[0] == plane[-1] and not np.any(plane != plane[0]):
        return CONSTANT, plane[:1].tobytes()
    noise = sampled and entropy_bits(plane) >= _INCOMPRESSIBLE_BITS
    if plane.size >= _TRY_BYTES and not noise:
        body = _compressor().compress(plane.data)
        if len(body) < plane.size:
            return ZSTD, body
    return RAW, plane.tobytes()


def _restored(how: int, body: memoryview, size: int, where: str) -> Bytes:
    if how == CONSTANT and len(body) == 1:
        return np.full(size, body[0], np.uint8)
    if how == ZSTD:
        plane = np.frombuffer(_decompressed(body, size, where), np.uint8)
    elif how == RAW:
        plane = np.frombuffer(body, np.uint8)
    else:
        raise ObjectError(f"{where}: stored as {how} in {len(body)} bytes, which no reader knows")
    if plane.size != size:
        raise ObjectError(f"{where}: expected {size} bytes, got {plane.size}")
    return plane


def _decompressed(body: memoryview, size: int, where: str) -> bytes:
    try:
        stated = zstandard.get_frame_parameters(body).content_size
        # A stated size would be allocated whatever the limit is, so it must be right, too.
        if stated not in (zstandard.CONTENTSIZE_UNKNOWN, size):
            raise ObjectError(f"{where}: expected {size} bytes, its frame states {stated}")
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor()
        decompressor: zstandard.ZstdDecompressor = _local.decompressor
        return decompressor.decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ObjectError(f"{where}: expected a frame of {size} bytes: {error}") from error
