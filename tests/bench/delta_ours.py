"""Our codec of deltas in a process of its own: `delta_ours FOLDER THREADS REPEATS CASE...`."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from modelexpress_rl.canonical.grid import Slice
from modelexpress_rl.canonical.index import Encoding, Index, shard_name, write_index
from modelexpress_rl.canonical.joining import advance, squash
from modelexpress_rl.canonical.memory import Bytes
from modelexpress_rl.canonical.objects import BytesObject
from modelexpress_rl.canonical.plain_files import (
    Change,
    add_full,
    add_xor_deltas,
    copy_full,
    read_full,
    read_xor,
)
from modelexpress_rl.canonical.shard_writer import ShardWriter
from modelexpress_rl.canonical.sparse import SparseTensor, byte_ranges, read_sparse
from modelexpress_rl.canonical.sparse_writer import SparseWriter, TypedChange
from modelexpress_rl.canonical.xor import replay
from tests.bench.delta_case import COLUMNS
from tests.bench.result import peak_bytes, resident_bytes

FILE = shard_name(0, 1)
Deltas = dict[str, SparseTensor]


def main() -> None:
    """Measure the cases that are named, and print their figures."""
    folder, threads, repeats = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    tensors = json.loads((folder / "tensors.json").read_text())
    base = np.array_split(np.fromfile(folder / "base.bin", np.uint8), tensors)
    figures = {}
    for case in sys.argv[4:]:
        if case == "chain":
            figures["newcomer 32 behind"] = newcomer(folder / "chain", threads, repeats)
            continue
        new = np.array_split(np.fromfile(folder / f"{case}.bin", np.uint8), tensors)
        figures[case] = one(base, new, threads, repeats)
        if case == "changed 2 %":
            figures["TP 4 rank, changed 2 %"] = quarter(base, new, threads, repeats)
    print(json.dumps(figures))


def encode(
    base: list[Bytes], new: list[Bytes], threads: int, blocks: int = 1
) -> tuple[Index, bytes, float, int]:
    """The index, the file, the seconds that it took, and what it took of memory beside the tensors."""
    changes = [
        TypedChange(str(i), "BF16", (before.nbytes // 2 // COLUMNS, COLUMNS), before, after, blocks)
        for i, (before, after) in enumerate(zip(base, new, strict=True))
    ]
    Path("/proc/self/clear_refs").write_text("5")  # begin to count the peak anew
    held = resident_bytes()
    begun = time.perf_counter()
    with SparseWriter(threads=threads) as writer:
        writer.add(changes)
        prefix = writer.prefix()
        took = time.perf_counter() - begun
        extra = peak_bytes() - held
        data = b"".join(writer.parts())
        index = Index(Encoding.SPARSE, dict.fromkeys(writer.names, FILE), "v1", "v0", prefixes={FILE: prefix})
    return index, data, took, extra


def opened(index: Index, data: bytes) -> Deltas:
    return read_sparse(index, lambda name: BytesObject(name, data))


def one(base: list[Bytes], new: list[Bytes], threads: int, repeats: int) -> dict[str, float]:
    """Encode and decode a bucket."""
    total = sum(part.nbytes for part in base)
    out = [np.zeros_like(part) for part in base]
    encoded_s, decoded_s, extras, size = [], [], [], 0
    for _ in range(repeats):
        index, data, took, extra = encode(base, new, threads)
        encoded_s.append(took)
        extras.append(extra)
        size = len(data) + len(write_index(index))
        begun = time.perf_counter()
        for name, delta in opened(index, data).items():
            advance([delta], base[int(name)], out[int(name)], threads=threads)
        decoded_s.append(time.perf_counter() - begun)
    assert all(np.array_equal(left, right) for left, right in zip(out, new, strict=True))
    return in_format_of_0_7(base, new, threads) | {
        "ratio": total / size,
        "encode_gb_s": total / min(encoded_s) / 1e9,
        "decode_gb_s": total / min(decoded_s) / 1e9,
        "peak_over_base": 1 + max(extras) / total,
    }


def in_format_of_0_7(base: list[Bytes], new: list[Bytes], threads: int) -> dict[str, float]:
    """The same bucket by our encoder and decoder of 0.7.0's format, once."""
    total = sum(part.nbytes for part in base)
    Path("/proc/self/clear_refs").write_text("5")
    held = resident_bytes()
    begun = time.perf_counter()
    with ShardWriter() as writer:
        pairs = enumerate(zip(base, new, strict=True))
        add_xor_deltas(writer, [Change(str(i), *pair) for i, pair in pairs], threads=threads)
        took = time.perf_counter() - begun
        extra = peak_bytes() - held
        data = b"".join(writer.parts())
        index = Index(Encoding.XOR, dict.fromkeys(writer.names, FILE), "v1", "v0")
    out = [np.zeros_like(part) for part in base]
    frames = read_xor(index, lambda name: BytesObject(name, data))
    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(
            pool.map(
                lambda item: replay(item[0], base[int(item[0])], [item[1]], out[int(item[0])]), frames.items()
            )
        )
    decoded = time.perf_counter() - begun
    assert all(np.array_equal(left, right) for left, right in zip(out, new, strict=True))
    return {
        "xor_ratio": total / len(data),
        "xor_encode_gb_s": total / took / 1e9,
        "xor_decode_gb_s": total / decoded / 1e9,
        "xor_peak_over_base": 1 + extra / total,
    }


def quarter(base: list[Bytes], new: list[Bytes], threads: int, repeats: int) -> dict[str, float]:
    """What a rank of four reads: rows of the first half of the tensors, columns of the others."""
    half = len(base) // 2
    deltas = (
        opened(*encode(base[:half], new[:half], threads)[:2]),
        opened(*encode(base[half:], new[half:], threads, blocks=4)[:2]),
    )
    asked = took = 0.0
    whole_bytes = read_bytes = 0
    for cut, of_it, before, after in zip(
        ("rows", "columns"), deltas, (base[:half], base[half:]), (new[:half], new[half:]), strict=True
    ):
        for name, delta in of_it.items():
            shape = delta.entry.shape
            part = (
                Slice((shape[0] // 4, 0), (shape[0] // 4, shape[1]))
                if cut == "rows"
                else Slice((0, shape[1] // 4), (shape[0], shape[1] // 4))
            )
            whole_bytes += delta.entry.payload_bytes
            read_bytes += sum(end - begin for begin, end in byte_ranges(delta, part))
            held, right = (_held(data[int(name)], shape, part) for data in (before, after))
            out = np.empty_like(held)
            best = []
            for _ in range(repeats):
                begun = time.perf_counter()
                advance([delta], held, out, part=part, threads=threads)
                best.append(time.perf_counter() - begun)
            took += min(best)
            assert np.array_equal(out, right)
            asked += held.nbytes
        prefix = next(iter(of_it.values())).begin
        whole_bytes += prefix
        read_bytes += prefix
    return {"read_bytes": read_bytes, "of_all_bytes": read_bytes / whole_bytes, "advance_ms": took * 1e3}


def _held(data: Bytes, shape: tuple[int, ...], part: Slice) -> Bytes:
    cut = tuple(slice(begin, begin + extent) for begin, extent in zip(part.offset, part.shape, strict=True))
    return np.ascontiguousarray(data.view(np.uint16).reshape(shape)[cut]).reshape(-1).view(np.uint8)


def newcomer(folder: Path, threads: int, repeats: int) -> dict[str, float]:
    """32 deltas in one pass, beside reading the last version as a full checkpoint; both verify."""
    versions = [
        np.fromfile(folder / f"{number}.bin", np.uint8) for number in range(len(list(folder.iterdir())))
    ]
    made = [encode([before], [after], threads)[:2] for before, after in pairwise(versions)]
    with ShardWriter() as writer:
        add_full(writer, "0", "U8", (versions[-1].nbytes,), versions[-1])
        full = b"".join(writer.parts())
    chain = [opened(*each)["0"] for each in made]
    with SparseWriter(threads=threads) as squashed:
        begun = time.perf_counter()
        squash(chain, squashed, threads=threads)
        squash_s = time.perf_counter() - begun
        one_delta = b"".join(squashed.parts())
        joined = Index(Encoding.SPARSE, {"0": FILE}, "v", "v0", prefixes={FILE: squashed.prefix()})
    index: Any = Index(Encoding.FULL, {"0": FILE}, total_size_bytes=versions[-1].nbytes)
    out = np.zeros_like(versions[0])
    deltas_s, squashed_s, full_s = [], [], []
    for _ in range(repeats):
        for times, deltas in ((deltas_s, made), (squashed_s, [(joined, one_delta)])):
            begun = time.perf_counter()
            advance([opened(*each)["0"] for each in deltas], versions[0], out, threads=threads)
            times.append(time.perf_counter() - begun)
            assert np.array_equal(out, versions[-1])
        begun = time.perf_counter()
        copy_full("0", read_full(index, lambda name: BytesObject(name, full))["0"], out)
        full_s.append(time.perf_counter() - begun)
    return {
        "over_full_read": min(deltas_s) / min(full_s),
        "of_full_bytes": sum(len(data) for _, data in made) / len(full),
        "squashed_over_full_read": min(squashed_s) / min(full_s),
        "squashed_of_full_bytes": len(one_delta) / len(full),
        "squash_gb_s": versions[-1].nbytes / squash_s / 1e9,
    }


if __name__ == "__main__":
    main()
