"""0.7.0's planner on manifests of version 1, in an interpreter of its own.

Called as `python -P plan_peer.py FOLDER WHAT`; WHAT is "measure", "merge" (no plan), or "segments" (the plan
itself). Only public names of the package are used, as its documentation strings describe them; nothing of
ours is imported.
"""

import json
import math
import resource
import sys
import time
from pathlib import Path


def main() -> None:
    import torch
    from modelexpress.refit.reshard import rendezvous, transfer_plan
    from modelexpress.refit.reshard.types import CaptureResult, RecordedCopy

    folder, what = Path(sys.argv[1]), sys.argv[2]
    documents = [path.read_bytes() for path in sorted(folder.glob("*.json"))]
    needs = json.loads((folder / "needs").read_text())
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = [time.perf_counter()]
    tables = [rendezvous.unwrap_rendezvous_blob(document).tensors for document in documents]
    times.append(time.perf_counter())
    sources, _, _ = rendezvous.build_sources(rendezvous.merge_shard_tables(tables))
    times.append(time.perf_counter())
    figures = {"peer_decode_ms": (times[1] - times[0]) * 1e3, "peer_merge_ms": (times[2] - times[1]) * 1e3}
    if what != "merge":
        copies = []
        for number, (name, offset, shape) in enumerate(needs):
            narrowed = tuple(
                ("narrow", (axis, begin, extent), ())
                for axis, (begin, extent, full) in enumerate(
                    zip(offset, shape, sources[name].global_shape, strict=True)
                )
                if extent != full
            )
            stride = tuple(torch.empty(shape, device="meta").stride())
            copies.append(
                RecordedCopy(name, narrowed, str(number), 0, tuple(shape), stride, sources[name].dtype)
            )
        started, spent = time.perf_counter(), time.process_time()
        plan = transfer_plan.plan_transfer(CaptureResult(copies=copies), sources)
        figures["peer_plan_ms"] = (time.perf_counter() - started) * 1e3
        figures["peer_plan_cpu_ms"] = (time.process_time() - spent) * 1e3
        if plan.fallback or plan.converts or (plan.full_pulls and what == "segments"):
            raise SystemExit("0.7.0 planned some of it in another way than by segments")
        needed = sum(sources[copy.src_name].elsize * math.prod(copy.dest_shape) for copy in copies)
        figures["peer_descriptors"] = plan.descriptor_count()
        figures["peer_amplification"] = plan.bytes_planned() / needed
    figures["peer_peak_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    if what == "segments":
        figures["segments"] = [
            (segment.src_addr, int(segment.param_name), segment.dst_byte, segment.nbytes)
            for segment in plan.segments
        ]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
