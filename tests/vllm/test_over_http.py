"""`vllm serve`, two ranks, refitted over HTTP by a trainer in a process of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def serving(checkpoint: Path, ranks: int) -> Iterator[str]:
    """A `vllm serve`; the backend is called `modelexpress`: NVIDIA's package is not installed here."""
    port = free_port()
    options = {
        "--port": port,
        "--host": "127.0.0.1",
        "--tensor-parallel-size": ranks,
        "--max-model-len": 256,
        "--max-num-seqs": 8,
        "--block-size": BLOCK,
        "--weight-transfer-config": json.dumps({"backend": "modelexpress"}),
    }
    command = [sys.executable, "-m", "tests.vllm.cli", "serve", str(checkpoint)]
    command += ["--enforce-eager", "--tokens-only", "--skip-tokenizer-init"]
    command += [str(part) for option in options.items() for part in option]
    with running(command, {"VLLM_SERVER_DEV_MODE": "1"}) as server:
        server.wait_for_line("Application startup complete", START_S)
        yield f"http://127.0.0.1:{port}"


def test_five_steps_on_two_ranks(tmp_path: Path, control_plane: str) -> None:
    steps = [write(tmp_path, "qwen3", step) for step in range(STEPS + 1)]
    with serving(steps[0], ranks=2) as url:
        command = [sys.executable, "-m", "tests.vllm.trainer_process", url, *map(str, steps[1:])]
        with running(command) as trainer:
            answers = [json.loads(trainer.wait_for_line("[[", STEP_S)) for _ in range(STEPS)]
            assert trainer.wait(STEP_S) == 0, trainer.text
    with engine(steps[-1], tensor_parallel_size=2) as fresh:
        assert answers[-1] == greedy(fresh)
    assert len({json.dumps(answer) for answer in answers}) == STEPS


def test_five_steps_of_an_fsdp_trainer(tmp_path: Path, control_plane: str) -> None:
    first = write(tmp_path, "qwen3", 0)
    with serving(first, ranks=1) as url, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "tests.vllm.fsdp_rank", url, str(first), str(tmp_path), str(STEPS)]
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        leader, other = (
            stack.enter_context(running(command, {**rendezvous, "RANK": str(rank)})) for rank in (0, 1)
        )
        answers = [json.loads(leader.wait_for_line("[[", STEP_S)) for _ in range(STEPS)]
        for rank in (leader, other):
            assert rank.wait(STEP_S) == 0, rank.text
    for step, answer in enumerate(answers, 1):
        with engine(tmp_path / str(step)) as fresh:
            assert answer == greedy(fresh), step
    assert len({json.dumps(answer) for answer in answers}) == STEPS
