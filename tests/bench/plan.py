"""plan: manifests decoded, merged and planned for one generator rank, beside 0.7.0's planner on the same.

Each case runs in a process of its own. `decode_ms` includes the check of what the control plane carries, and
`plan_ms` begins with the boxes that the engine loads and ends with the proof; `*_cpu_ms` is the least CPU
time of all rounds, which other work on the machine disturbs less. `encode_ms` is that of all trainer
ranks together, in columns. With `--peer-python` the
published 0.7.0 plans in its own environment, from the same manifests in version 1; on small shapes the
bytes that both plans move are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelexpress_rl.reshard import manifest_columns
from modelexpress_rl.reshard.geometry import Shard, ShardTable
from modelexpress_rl.reshard.manifest import Manifest, digest
from tests.bench.plan_compare import compared
from tests.bench.result import Result, machine
from tests.reshard import model_geometry

ROOT = Path(__file__).resolve().parents[2]
DTYPE, ELSIZE = "torch.bfloat16", 2
PEER_TIMEOUT_S = 1800.0
GOALS = {  # of qwen3-30b-a3b; of moe-671b
    "decode_ms": "< 50 with merge; < 400 with both",
    "plan_ms": "< 50; < 400 with both",
    "encode_ms": "none; < 150 with decode and merge",
    "warm_ms": "< 5",
    "peak_mb": "< 200; none",
    "manifest_bytes": "< 800,000; < 2,000,000",
    "amplification": "1",
    "plan_ratio": "1,000; none",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One model, sharded by a trainer and by a generator: (tensor parallel, expert parallel)."""

    model: str
    trainer: tuple[int, int]
    generator: tuple[int, int]
    peer_plans: bool = True  # a run is an object there: a hundred million don't fit


CASES = {
    "qwen3-30b-a3b": Case("qwen3-30b-a3b", (4, 16), (4, 1)),
    "moe-671b-tp16": Case("moe-671b", (8, 64), (16, 1), peer_plans=False),
    "moe-671b-ep16": Case("moe-671b", (8, 64), (1, 16)),
}
COMPARED = {
    "tiny-moe-tp4": Case("tiny-moe", (2, 4), (4, 1)),
    "tiny-moe-ep8": Case("tiny-moe", (4, 2), (2, 8)),
    "tiny-moe-tp8": Case("tiny-moe", (1, 8), (8, 1)),
    "tiny-dense-tp2": Case("tiny-dense", (8, 1), (2, 1)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--peer-python", metavar="PATH", help="of an environment with modelexpress 0.7.0")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="(all)")
    parser.add_argument("--rounds", type=int, default=9, help="of ours, medians count (%(default)s)")


def run(arguments: argparse.Namespace) -> Result:
    """Measure case after case; then compare on small shapes, where there is a peer."""
    cases = {
        name: _measured(CASES[name], arguments.rounds, arguments.peer_python) for name in arguments.cases
    }
    conditions = f"{machine()}; rank 1 of the generator; medians of {arguments.rounds} rounds of ours"
    if arguments.peer_python:
        found = [name for name, case in COMPARED.items() if _same(case, arguments.peer_python)]
        conditions += f", one of 0.7.0's; both plans move the same bytes in {', '.join(found)}"
    return Result("Plans for one generator rank", {"cases": cases}, GOALS, conditions)


def _measured(case: Case, rounds: int, peer_python: str | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(case, folder)
        ours = [sys.executable, "-m", "tests.bench.plan_case", name, str(rounds)]
        figures: dict[str, float] = _answer(ours, ROOT, 600.0)
        figures["manifest_bytes"] = sum(path.stat().st_size for path in folder.glob("*.columns"))
        if peer_python:
            figures |= _peer(peer_python, folder, "measure" if case.peer_plans else "merge")
        if "peer_plan_ms" in figures:
            figures["plan_ratio"] = figures["peer_plan_ms"] / figures["plan_ms"]
            figures["plan_cpu_ratio"] = figures["peer_plan_cpu_ms"] / figures["plan_cpu_ms"]
        return figures


def _peer(python: str, folder: Path, what: str) -> Any:
    script = Path(__file__).with_name("plan_peer.py")
    return _answer([python, "-P", str(script), str(folder), what], folder, PEER_TIMEOUT_S)


def _answer(command: list[str], at: Path, timeout_s: float) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=at, env=environment, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _write(case: Case, folder: Path) -> None:
    """Every manifest in both encodings, its digest, and what the generator's rank needs."""
    model = model_geometry.MODELS[case.model]
    tensors = list(model_geometry.tensors(model))
    noise = np.random.default_rng(0)
    digests = []
    for rank, boxes in enumerate(model_geometry.trainer_shards(tensors, model.experts, *case.trainer)):
        addr = (0x7F00 << 32) + (rank << 40)
        shards = []
        for (index, offset, shape), gap in zip(boxes, noise.integers(0, 8, len(boxes)).tolist(), strict=True):
            tensor = tensors[index]
            shards.append(Shard(tensor.name, DTYPE, tensor.shape, offset, shape, addr))
            size_bytes = int(np.prod(shape)) * ELSIZE
            addr += 512 * (-(-size_bytes // 512) + gap)  # as an allocator of tensors leaves them
        meta = noise.bytes(1024)
        manifest = Manifest(f"trainer-{rank}", f"10.0.0.{rank}:5555", meta, ShardTable.build(shards))
        document, columns = manifest_columns.encodings(manifest)
        assert columns is not None
        digests.append(digest(document))
        (folder / f"{rank:03d}.json").write_bytes(document)
        (folder / f"{rank:03d}.columns").write_bytes(columns)
    needs = model_geometry.generator_needs(tensors, model.experts, *case.generator)[1]
    rows = [(tensors[index].name, offset, shape) for index, offset, shape in needs]
    (folder / "digests").write_text(json.dumps(digests))
    (folder / "needs").write_text(json.dumps(rows))


def _same(case: Case, peer_python: str) -> bool:
    """Whether all ranks' plans of ours and of the peer move the same bytes; raises where they don't."""
    model = model_geometry.MODELS[case.model]
    tensors = list(model_geometry.tensors(model))
    shards = model_geometry.trainer_shards(tensors, model.experts, *case.trainer)
    for rank, boxes in enumerate(model_geometry.generator_needs(tensors, model.experts, *case.generator)):
        with tempfile.TemporaryDirectory() as name:
            compared(
                {tensor.name: tensor.shape for tensor in tensors},
                [[(tensors[i].name, offset, shape) for i, offset, shape in held] for held in shards],
                [(tensors[i].name, offset, shape) for i, offset, shape in boxes],
                Path(name),
                lambda folder: _peer(peer_python, folder, "segments"),
                spread=rank,
            )
    return True
