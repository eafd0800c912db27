"""The files of a version as 0.7.0 writes and reads them: XOR deltas, and full checkpoints."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import SpooledTemporaryFile

from modelexpress_rl.canonical.index import Encoding, Index
from modelexpress_rl.canonical.memory import Bytes, in_order
from modelexpress_rl.canonical.objects import ObjectReader, read_range
from modelexpress_rl.canonical.shard_writer import PART_BYTES, ShardWriter
from modelexpress_rl.canonical.tensor_file import Stored, TensorFile, parse_object, read_header
from modelexpress_rl.canonical.xor import BLOCK_BYTES, Frame, XorEncoder, check_adler, is_adler
from modelexpress_rl.errors import ObjectError

FULL_BATCH_BYTES = 4 << 30
_IN_MEMORY_BYTES = 1 << 20  # of each frame that is being made; what is longer goes to a temporary file

Open = Callable[[str], ObjectReader]


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor's memory before and after a step."""

    name: str
    base: Bytes
    new: Bytes


def add_xor_deltas(
    writer: ShardWriter,
    changes: Iterable[Change],
    *,
    threads: int | None = None,
    spool_dir: Path | None = None,
) -> int:
    """Encode a bucket of tensors into a shard; returns how many bytes changed.

    Tensors that did not change are left out, as the format has it. At most 1 MiB of each frame is in
    memory, and two frames for each thread are begun.

    Raises:
        UsageError: base and new differ in size, or a name comes twice.
        OSError: the disk of the spool is full.
    """
    count = threads or os.cpu_count() or 1
    changed = 0
    made_files: list[SpooledTemporaryFile[bytes]] = []

    def encode(change: Change) -> tuple[XorEncoder, SpooledTemporaryFile[bytes]] | None:
        encoder = XorEncoder(change.name, change.base, change.new)
        if encoder.unchanged():
            return None
        frame = SpooledTemporaryFile[bytes](
            _IN_MEMORY_BYTES, dir=None if spool_dir is None else str(spool_dir)
        )
        made_files.append(frame)
        for part in encoder.parts():
            frame.write(part)
        frame.seek(0)
        return encoder, frame

    changes = list(changes)
    with _all_closed(made_files), ThreadPoolExecutor(count, "mx-xor") as pool:
        for change, made in zip(changes, in_order(pool, encode, changes, 2 * count), strict=True):
            if made is not None:
                encoder, frame = made
                with frame:
                    parts = iter(partial(frame.read, PART_BYTES), b"")
                    writer.add(change.name, parts, checksum=encoder.checksum)
                changed += encoder.changed_bytes
    return changed


@contextmanager
def _all_closed(files: list[SpooledTemporaryFile[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        for file in files:
            file.close()


def add_full(writer: ShardWriter, name: str, dtype: str, shape: tuple[int, ...], data: Bytes) -> None:
    """Put a tensor itself into a shard of a full checkpoint.

    Raises:
        UsageError: the name comes twice.
        OSError: the disk of the spool is full.
    """
    parts = (data[at : at + PART_BYTES].data for at in range(0, data.nbytes, PART_BYTES))
    writer.add(name, parts, dtype=dtype, shape=shape, checksum=f"{zlib.adler32(data.data):08x}")


def full_batches(sizes: Mapping[str, int], max_bytes: int = FULL_BATCH_BYTES) -> list[list[str]]:
    """Which tensors go into which shard of a full checkpoint, in the order given.

    A batch has at most `max_bytes`, or one tensor. So the number of shards is known before the first of
    them is made, and each can be uploaded when it is.
    """
    batches: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not batches:
            batches.append([])
            room = max_bytes
        batches[-1].append(name)
        room -= size
    return batches


def read_files(index: Index, open_file: Open) -> Iterator[tuple[str, TensorFile, ObjectReader]]:
    """The files of a version one by one, each with exactly the tensors that the index says.

    Raises:
        ObjectError: a file is malformed, or holds other tensors; names file and tensor.
    """
    expected: dict[str, set[str]] = {}
    for tensor, name in index.weight_map.items():
        expected.setdefault(name, set()).add(tensor)
    for name in index.files:
        source = open_file(name)
        file = read_header(source)
        if odd := expected[name] ^ file.tensors.keys():
            tensor = min(odd)
            says = (
                "in this file, which lacks it"
                if tensor in expected[name]
                else "not in this file, which has it"
            )
            raise ObjectError(f"{source.name}: tensor {tensor!r} is by the index {says}")
        yield name, file, source


def read_xor(index: Index, open_file: Open) -> dict[str, Frame]:
    """Where each delta of a version lies.

    Raises:
        ObjectError: the version is no XOR delta, or a file is malformed; names file and tensor.
    """
    _expect(index, Encoding.XOR)
    frames = {}
    for _, file, source in read_files(index, open_file):
        for tensor, stored in file.tensors.items():
            if stored.dtype != "U8" or len(stored.shape) != 1:
                raise ObjectError(
                    f"{source.name}: tensor {tensor!r}: a delta is of U8 and one dimension, "
                    f"not {stored.dtype} of shape {stored.shape!r:.100}"
                )
            frames[tensor] = Frame(source, stored.begin, stored.end, _checksum(file, tensor))
    return frames


@dataclass(frozen=True, slots=True)
class FullTensor:
    """Where a tensor of a full checkpoint lies."""

    stored: Stored
    frame: Frame


def read_full(index: Index, open_file: Open) -> dict[str, FullTensor]:
    """Where each tensor of a full checkpoint lies.

    Raises:
        ObjectError: the version is a delta, a file is malformed, or the sizes don't add up.
    """
    _expect(index, Encoding.FULL)
    tensors = {}
    for _, file, source in read_files(index, open_file):
        for name, stored in file.tensors.items():
            frame = Frame(source, stored.begin, stored.end, _checksum(file, name))
            tensors[name] = FullTensor(stored, frame)
    total = sum(tensor.stored.size_bytes for tensor in tensors.values())
    if total != index.total_size_bytes:
        raise ObjectError(
            f"a full checkpoint: expected {index.total_size_bytes} bytes of tensors, its files have {total}"
        )
    return tensors


def copy_full(name: str, tensor: FullTensor, out: Bytes) -> None:
    """Read a tensor of a full checkpoint into memory of its size, some MiB at a time, and check it.

    Raises:
        ObjectError: the memory is of another size, or the object ends early.
        DigestMismatch: the bytes are not those that were published.
    """
    frame = tensor.frame
    if out.nbytes != frame.end - frame.begin:
        raise ObjectError(
            f"{frame.source.name}: tensor {name!r}: "
            f"expected {out.nbytes} bytes, got {frame.end - frame.begin}"
        )
    adler = 1
    view = out.data
    for at in range(0, out.nbytes, BLOCK_BYTES):
        end = min(at + BLOCK_BYTES, out.nbytes)
        data = read_range(frame.source, frame.begin + at, frame.begin + end, f"tensor {name!r}")
        adler = zlib.adler32(data, adler)
        view[at:end] = data
    check_adler(name, adler, frame)


def tied_names(config: bytes, where: str) -> frozenset[str]:
    """The tensors that a checkpoint holds twice under a config.json, and that are skipped.

    Raises:
        ObjectError: it is no JSON object.
    """
    tied = parse_object(config, where).get("tie_word_embeddings") is True
    return frozenset({"lm_head.weight"} if tied else ())


def published(tensors: Iterable[Sequence[str]]) -> dict[str, int]:
    """Which rank has which tensor, from each rank's names.

    Raises:
        ObjectError: two ranks have one tensor; names all three.
    """
    owner: dict[str, int] = {}
    for rank, names in enumerate(tensors):
        for name in names:
            if name in owner:
                raise ObjectError(f"tensor {name!r} comes from rank {owner[name]} and from rank {rank}")
            owner[name] = rank
    return owner


def _expect(index: Index, encoding: Encoding) -> None:
    if index.encoding is not encoding:
        raise ObjectError(f"version {index.version!r}: expected encoding {encoding}, got {index.encoding}")


def _checksum(file: TensorFile, tensor: str) -> str:
    text = file.metadata.get(tensor)
    if not is_adler(text):
        raise ObjectError(
            f"{file.name}: tensor {tensor!r}: its checksum must be 8 hex digits, not {text!r:.100}"
        )
    return str(text)
