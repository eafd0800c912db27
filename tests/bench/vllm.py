"""vllm: a `vllm serve` on the CPU refitted by us, against a checkpoint that is written and reloaded."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys

from tests.bench.result import Result, machine

RUN_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--python", default=sys.executable, help="of an environment with vLLM, as `make test-vllm` makes one"
    )
    parser.add_argument("--models", nargs="+", default=["tiny", "0.5b"], choices=["tiny", "0.5b"])
    parser.add_argument("--rounds", type=int, default=5, help="versions that are measured, after a first one")


def run(arguments: argparse.Namespace) -> Result:
    """Have the environment with vLLM measure, and put the figures together."""
    if arguments.python == sys.executable and importlib.util.find_spec("vllm") is None:
        raise SystemExit(
            "vLLM isn't installed here: --python .venv-vllm/bin/python (make test-vllm makes it)"
        )
    figures: dict[str, dict[str, float]] = {}
    for model in arguments.models:
        command = [arguments.python, "-m", "tests.bench.vllm_peer", model, str(arguments.rounds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=RUN_S, check=True)
        for name, figure in json.loads(done.stdout.splitlines()[-1]).items():
            figures.setdefault(name, {})[model] = figure
    conditions = f"{machine()}; one rank, bfloat16, medians of {arguments.rounds} warm versions"
    return Result("A vLLM server on the CPU", dict(figures), {}, conditions)
