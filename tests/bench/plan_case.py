"""One case of `python -m tests.bench plan`: `python -m tests.bench.plan_case FOLDER ROUNDS`, in JSON."""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from modelexpress_rl.inference.adapter import PublishedTensor
from modelexpress_rl.inference.lease import Publication
from modelexpress_rl.inference.nearness import Nearness
from modelexpress_rl.inference.planning import Planning
from modelexpress_rl.inference.sources import SourceFetcher
from modelexpress_rl.reshard.manifest_columns import decode_announced, encode
from modelexpress_rl.reshard.merge import SourceManifest, merge
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.planner import plan
from modelexpress_rl.reshard.proof import prove_plan
from modelexpress_rl.topology import Topology
from modelexpress_rl.train.adapter import WeightVersionShardManifest
from modelexpress_rl.train.manifest_service import ManifestService, ServedShard
from statemachines.ids import VersionId, WorkerId
from tests.bench.result import peak_bytes, resident_bytes


def main() -> None:
    """Measure, and print one JSON object."""
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    columns = [path.read_bytes() for path in sorted(folder.glob("*.columns"))]
    digests = json.loads((folder / "digests").read_text())
    needs = [
        Need(name, "torch.bfloat16", tuple(offset), tuple(shape))
        for name, offset, shape in json.loads((folder / "needs").read_text())
    ]
    gc.collect()
    before = resident_bytes()
    seen: dict[str, list[float]] = {}
    spent: dict[str, list[float]] = {}
    figures: dict[str, float] = {}
    for number in range(rounds):
        figures = _round(columns, digests, needs, seen, spent)
        if number == 0:
            figures["peak_mb"] = peak_mb = (peak_bytes() - before) / 2**20
        gc.collect()
    figures["peak_mb"] = peak_mb
    seen["warm_ms"] = asyncio.run(_warm(folder, digests, needs, rounds))
    figures |= {name: statistics.median(values) for name, values in seen.items()}
    figures |= {name: min(values) for name, values in spent.items()}
    print(json.dumps(figures))


def _round(
    columns: Sequence[bytes],
    digests: Sequence[str],
    needs: Sequence[Need],
    seen: dict[str, list[float]],
    spent: dict[str, list[float]],
) -> dict[str, float]:
    times = [_clocks()]
    manifests = [decode_announced(data, known) for data, known in zip(columns, digests, strict=True)]
    times.append(_clocks())
    merged = merge([SourceManifest.of(f"slot-{i}", f"worker-{i}", each) for i, each in enumerate(manifests)])
    times.append(_clocks())
    table = NeedTable.build(needs)
    made = plan(table, merged)
    prove_plan(made, table, merged)
    times.append(_clocks())
    for manifest in manifests:
        encode(manifest)
    times.append(_clocks())
    for name, begin, end in zip(("decode", "merge", "plan", "encode"), times, times[1:], strict=False):
        seen.setdefault(f"{name}_ms", []).append((end[0] - begin[0]) * 1e3)
        spent.setdefault(f"{name}_cpu_ms", []).append((end[1] - begin[1]) * 1e3)
    return {"amplification": made.amplification, "descriptors": made.descriptors}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class _Engine:
    """Loads what the case says, whatever is published."""

    def __init__(self, needs: Sequence[Need]) -> None:
        self.needs = needs

    def loader(self, published: Mapping[str, PublishedTensor]) -> Any:
        return self


async def _warm(folder: Path, digests: Sequence[str], needs: Sequence[Need], rounds: int) -> list[float]:
    """What a version costs from its listing to its plan where its manifests are those of the one before."""
    service = ManifestService("127.0.0.1")
    await service.start()
    publications = []
    for number, known in enumerate(digests):
        document = (folder / f"{number:03d}.json").read_bytes()
        manifest = WeightVersionShardManifest(
            document, 1, 1, columns=(folder / f"{number:03d}.columns").read_bytes()
        )
        service.serve("v0", f"slot-{number}", ServedShard(manifest))
        worker = WorkerId(f"worker-{number}")
        publications.append(Publication(f"slot-{number}", worker, known, service.endpoint, 1, 1))
    fetcher = SourceFetcher(rpc_timeout_s=60.0)
    planning = Planning(_Engine(needs), "this rank", Nearness(Topology()))
    times = []
    for number in range(rounds + 1):  # the first one is cold
        started = time.perf_counter()
        sources = await fetcher.fetch(VersionId(f"v{number}"), publications, anyio.current_time() + 600)
        await planning.planned(sources)
        times.append((time.perf_counter() - started) * 1e3)
    assert (planning.plans_made, fetcher.fetches) == (1, len(publications))
    await fetcher.aclose()
    await service.aclose()
    return times[1:]


if __name__ == "__main__":
    main()
