"""Whatever a program of 0.7.0 may call, it may call here, by the same names and in the same places."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.interop import signatures

ROOT = Path(__file__).parents[2]


def asked(python: str | Path, folder: Path) -> dict[str, Any]:
    """What a Python prints, from a folder that has no package of ours in it."""
    done = subprocess.run(
        [python, signatures.__file__], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_parameter_is_here(interop_python: Path, tmp_path: Path) -> None:
    theirs = asked(interop_python, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.interop.signatures"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    ours = json.loads(done.stdout.splitlines()[-1])
    assert len(theirs) > 30
    wrong = []
    for name, wanted in theirs.items():
        here = ours.get(name)
        if isinstance(wanted, dict):
            same = isinstance(here, dict) and wanted.items() <= here.items()
        else:
            same = here is not None and accepts(here, wanted)
        if not same:
            wrong.append(f"{name}: 0.7.0 has {wanted}, here is {here}")
    assert wrong == [], "\n".join(wrong)


def accepts(here: list[list[Any]], wanted: list[list[Any]]) -> bool:
    """Whether each call that fits the one fits the other."""
    names = {name: optional for name, _, optional in here}
    in_place = [name for name, by_position, _ in here if by_position]
    wanted_in_place = [name for name, by_position, _ in wanted if by_position]
    own = [optional for name, _, optional in here if name not in {each[0] for each in wanted}]
    return (
        in_place[: len(wanted_in_place)] == wanted_in_place
        and all(name in names and names[name] >= optional for name, _, optional in wanted)
        and all(own)
    )
