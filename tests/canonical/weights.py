"""Tensors of a small model before and after steps, and versions of them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from modelexpress_rl.canonical.index import Encoding, Index, shard_name, write_index
from modelexpress_rl.canonical.memory import Bytes
from modelexpress_rl.canonical.objects import BytesObject, FileObject
from modelexpress_rl.canonical.plain_files import Change, Open, add_xor_deltas
from modelexpress_rl.canonical.shard_writer import ShardWriter
from modelexpress_rl.canonical.tensor_file import read_header

GOLDEN = Path(__file__).parents[1] / "data" / "canonical"


def checkpoint(path: Path) -> dict[str, Bytes]:
    """Every tensor of the files in a folder, as bytes."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with FileObject(file) as source:
            for name, stored in read_header(source).tensors.items():
                tensors[name] = np.frombuffer(source.read(stored.begin, stored.end), np.uint8)
    return tensors


def golden(version: str) -> tuple[bytes, Open]:
    """The index of a version that 0.7.0 wrote, and what opens its files."""
    folder = GOLDEN / "run" / version
    return (folder / "model.safetensors.index.json").read_bytes(), in_memory(
        {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    )


def in_memory(files: Mapping[str, bytes]) -> Open:
    """What opens files that are in memory."""
    return lambda name: BytesObject(name, files[name])


def xor_version(
    version: str, base_version: str, ranks: Sequence[Iterable[Change]]
) -> tuple[bytes, dict[str, bytes]]:
    """An XOR delta: its index and its files, one for each rank that has changes."""
    with ExitStack() as stack:
        written = [stack.enter_context(ShardWriter()) for _ in ranks]
        for writer, changes in zip(written, ranks, strict=True):
            add_xor_deltas(writer, changes, threads=2)
        writers = [writer for writer in written if writer.names]
        files = {shard_name(i, len(writers)): b"".join(writer.parts()) for i, writer in enumerate(writers)}
        weight_map = {
            name: file for file, writer in zip(files, writers, strict=True) for name in writer.names
        }
    return write_index(Index(Encoding.XOR, weight_map, version, base_version)), files


def stepped(base: Bytes, word: int, share: float, seed: int) -> Bytes:
    """A copy in which about that share of the words has other low bits."""
    noise = np.random.default_rng(seed)
    words = base.view(f"u{word}").copy()
    words[noise.random(words.size) < share] ^= noise.integers(1, 8, dtype=np.uint8)
    return words.view(np.uint8)


def every_broken(data: bytes, attempt: Callable[[bytes], None], errors: tuple[type[Exception], ...]) -> int:
    """Flip each byte, and cut at each byte; `attempt` may succeed, or raise one of `errors`.

    Returns how often it raised.
    """
    raised = 0
    for at in range(len(data)):
        for broken in (data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :], data[:at]):
            try:
                attempt(broken)
            except errors:
                raised += 1
    return raised
