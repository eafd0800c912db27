"""The README's programs run as they stand."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import running, serve

pytest.importorskip("torch")
pytest.importorskip("nixl")

README = Path(__file__).parents[2] / "README.md"
EXAMPLE = re.compile(r"<!-- example: (\w+\.py) -->\n```python\n(.*?)```", re.DOTALL)


@pytest.mark.heavy
def test_trainer_generator_and_orchestrator(tmp_path: Path) -> None:
    programs = dict(EXAMPLE.findall(README.read_text()))
    assert sorted(programs) == ["generator.py", "orchestrator.py", "trainer.py"]
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    with contextlib.ExitStack() as stack:
        _, address = stack.enter_context(serve())
        environment = {"MODEL_EXPRESS_URL": address}
        started = {
            name: stack.enter_context(running([sys.executable, str(tmp_path / name)], environment))
            for name in sorted(programs)
        }
        for name, process in started.items():
            assert process.wait(90) == 0, f"{name}:\n{process.text}"
    served = [line for line in started["generator.py"].output if line.startswith("serving")]
    assert served == ["serving v1 1.0\n", "serving v2 2.0\n", "serving v3 3.0\n"]
