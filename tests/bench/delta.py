"""Deltas of bfloat16 weights after Adam-like steps: our codec and 0.7.0's, in one run on two cores.

    python -m tests.bench delta --peer-python PATH

Both encode and decode the same bucket in processes that take turns; of each figure the best of all repeats
counts. `peak_over_base` is the most memory beside the base over the size of the bucket, the bucket itself
included. `xor_` figures are our encoder and decoder of 0.7.0's format. Without --peer-python there are no
figures of 0.7.0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench import delta_case
from tests.bench.result import Result

PEER = Path(__file__).with_name("delta_peer.py")
TIMEOUT_S = 1200.0
CHAIN = 32
_LEAST = ("advance_ms", "over_full_read", "squashed_over_full_read")
GOALS = {
    "ratio": "2 %: at least 1.6 times peer_ratio",
    "encode_gb_s": "2 %: at least 2 times peer_encode_gb_s",
    "decode_gb_s": "2 %: at least 2 times peer_decode_gb_s",
    "peak_over_base": "< 1.2",
    "of_all_bytes": "0.25",
    "over_full_read": "< 2",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--peer-python", help="the Python of an environment with modelexpress 0.7.0")
    parser.add_argument("--mib", type=int, default=128, help="size of the bucket")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="how often the processes take turns")


def run(arguments: argparse.Namespace) -> Result:
    """Measure every case."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    cases: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tensors.json").write_text(json.dumps(delta_case.TENSORS))
        for case, share in delta_case.write(folder, arguments.mib << 20).items():
            cases[case] = {"changed_share": share}
        (folder / "chain").mkdir()
        delta_case.write_chain(folder / "chain", (arguments.mib << 20) // 8, CHAIN, 0.02)
        common = [str(folder), str(arguments.threads), str(arguments.repeats), *delta_case.SHARES]
        for _ in range(arguments.rounds):
            _best(cases, _answer([sys.executable, "-m", "tests.bench.delta_ours", *common, "chain"]))
            if arguments.peer_python:
                _best(cases, _answer([arguments.peer_python, "-P", str(PEER), *common]))
    for figures in cases.values():
        for figure in ("ratio", "encode_gb_s", "decode_gb_s"):
            if f"peer_{figure}" in figures:
                figures[f"{figure}_times_peer"] = figures[figure] / figures[f"peer_{figure}"]
    title = f"Deltas of a bucket of {arguments.mib} MiB, {arguments.threads} threads"
    return Result(title, {"cases": cases}, GOALS)


def _best(cases: dict[str, dict[str, float]], measured: dict[str, dict[str, float]]) -> None:
    for case, figures in measured.items():
        known = cases.setdefault(case, {})
        for name, value in figures.items():
            known[name] = (min if name in _LEAST else max)(value, known.get(name, value))


def _answer(command: list[str]) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
