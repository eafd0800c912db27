"""`vllm serve`, refitted over HTTP by real trainers of two ranks each."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.error
from pathlib import Path

import pytest

from tests.e2e.processes import running
from tests.vllm.checkpoints import write
from tests.vllm.engines import fresh
from tests.vllm.server import answers, free_port, post, serving, version_of

STEPS = 5
STEP_S = 120.0
CASES = [("fsdp_rank", "qwen3-tied", 1), ("megatron_rank", "llama", 1)]
if os.environ.get("MX_TEST_VLLM") == "all":
    CASES += [("fsdp_rank", "qwen3", 2), ("megatron_rank", "llama-tied", 2)]


@pytest.mark.parametrize(("trainer", "kind", "ranks"), CASES)
def test_each_step_is_answered_as_by_a_fresh_engine(
    trainer: str, kind: str, ranks: int, tmp_path: Path, control_plane: str
) -> None:
    first = write(tmp_path, kind, 0)
    with serving(first, ranks) as url:
        found = _refitted_by(trainer, url, first, tmp_path)
        post(f"{url}/start_weight_update")
        with pytest.raises(urllib.error.HTTPError, match="500"):
            post(f"{url}/update_weights", update_info={"version_id": "nobody's"})
        assert version_of(url) == f"run.token:{STEPS}"
        assert answers(url) == found[-1]
    for step, answer in enumerate(found, 1):
        assert answer == fresh(tmp_path / str(step), ranks), step
    assert len({json.dumps(answer) for answer in found}) == STEPS


def _refitted_by(trainer: str, url: str, first: Path, folder: Path) -> list[list[list[int]]]:
    """What the server answers after each step of two ranks, which end well."""
    command = [sys.executable, "-m", f"tests.vllm.{trainer}", url, str(first), str(folder), str(STEPS)]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with contextlib.ExitStack() as stack:
        leader, other = (
            stack.enter_context(running(command, {**rendezvous, "RANK": str(rank)})) for rank in (0, 1)
        )
        found = [json.loads(leader.wait_for_line("[[", STEP_S)) for _ in range(STEPS)]
        for rank in (leader, other):
            assert rank.wait(STEP_S) == 0, rank.text
    return found
