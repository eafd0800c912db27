"""Whatever the network, the clocks and the processes do, the promises hold. See tests/simulation."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation import transcript
from tests.simulation.many import command_of, run_seeds
from tests.simulation.planted import BUGS
from tests.simulation.world import simulate

SEEDS = int(os.environ.get("MX_SIM_SEEDS", "500"))
JOBS = min(os.cpu_count() or 1, 8)
FIND_WITHIN = 1_000


@pytest.mark.timeout(max(600, 4 * SEEDS))
def test_seeds() -> None:
    failed = [result for result in run_seeds(range(SEEDS), JOBS) if result.violation]
    words = [f"{result.verdict}\n  {command_of(result.seed)}" for result in failed]
    assert not failed, "\n".join(words)


def test_the_same_seed_gives_the_same_events() -> None:
    """In any process, whatever ran before, and however strings are hashed there."""
    simulate(8)
    here = simulate(7).log.digest()
    for hash_seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", "7", "--digest"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.stdout.strip() == here


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    for seed in range(FIND_WITHIN):
        violation = simulate(seed, bug=name).violation
        if violation is not None:
            assert violation.promise in bug.promises, violation
            return
    pytest.fail(f"not found in {FIND_WITHIN} seeds: {bug.words}")


@pytest.mark.parametrize("path", transcript.paths(), ids=lambda path: path.stem)
def test_a_transcript_is_as_it_was(path: object) -> None:
    """After a change that is meant: `python -m tests.simulation --regenerate`, and look at the diff."""
    text = path.read_text()  # type: ignore[attr-defined]
    assert transcript.run(text) == text
