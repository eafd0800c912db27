"""`vllm serve`, two ranks, refitted over HTTP by a trainer in a process of its own."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

from tests.e2e.processes import running
from tests.vllm.checkpoints import write
from tests.vllm.engines import engine, greedy
from tests.vllm.prompts import BLOCK

STEPS = 5
START_S = 400.0
STEP_S = 120.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_five_steps_over_http(tmp_path: Path, control_plane: str) -> None:
    """The backend is called `modelexpress`: NVIDIA's package is not installed here."""
    steps = [write(tmp_path, "qwen3", step) for step in range(STEPS + 1)]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = {
        "--port": port,
        "--host": "127.0.0.1",
        "--tensor-parallel-size": 2,
        "--max-model-len": 256,
        "--max-num-seqs": 8,
        "--block-size": BLOCK,
        "--weight-transfer-config": json.dumps({"backend": "modelexpress"}),
    }
    command = [sys.executable, "-m", "tests.vllm.cli", "serve", str(steps[0])]
    command += ["--enforce-eager", "--tokens-only", "--skip-tokenizer-init"]
    command += [str(part) for option in options.items() for part in option]
    with running(command, {"VLLM_SERVER_DEV_MODE": "1"}) as server:
        server.wait_for_line("Application startup complete", START_S)
        trainer = [sys.executable, "-m", "tests.vllm.trainer_process", url, *map(str, steps[1:])]
        with running(trainer) as run:
            answers = [json.loads(run.wait_for_line("[[", STEP_S)) for _ in range(STEPS)]
            assert run.wait(STEP_S) == 0, run.text
    with engine(steps[-1], tensor_parallel_size=2) as fresh:
        assert answers[-1] == greedy(fresh)
    assert len({json.dumps(answer) for answer in answers}) == STEPS
