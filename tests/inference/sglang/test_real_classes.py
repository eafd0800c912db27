"""SGLang's own Llama, Qwen3 and Qwen3-MoE take versions by its own loader, on one rank and on two."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from tests.e2e.processes import running
from tests.inference.sglang.real import MODELS

ROOT = Path(__file__).parents[3]
WAIT_S = 120.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_model_holds_what_sglang_itself_would_have_loaded(tmp_path: Path, ranks: int) -> None:
    command = [os.environ["MX_TEST_SGLANG"], "-m", "tests.inference.sglang.real", str(tmp_path)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(running([*command, str(rank), str(ranks)], cwd=str(ROOT)))
            for rank in range(ranks)
        ]
        for process in processes:
            found = json.loads(process.wait_for_line("found ", WAIT_S).removeprefix("found "))
            assert len(found) == 2 * len(MODELS)
            for name, each in found.items():
                assert each["differ"] == [], name
                assert each["moved"] == [], name
                bound = 1.0 if ranks == 1 or "whole" in name else 0.51
                assert each["read"] <= bound, name
            assert process.wait(WAIT_S) == 0, process.text
