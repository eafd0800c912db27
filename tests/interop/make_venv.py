"""A virtual environment with the published modelexpress 0.7.0, which the interoperation tests speak to.

    python -m tests.interop.make_venv [FOLDER]

prints the path of its Python. The folder is MX_INTEROP_VENV where none is given, else one under the
user's cache, so that it is made once; MX_INTEROP_VENV=off skips the tests that need it. It has to be an
environment of its own: that package has a `modelexpress_rl` too, and its torch takes gigabytes where pip
finds no build for the CPU. Nothing but the standard library is needed here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.7.0"
# torch comes first, and is named again: nothing after it may bring another build.
STEPS = (
    ("torch==2.13.0",),
    (f"modelexpress=={VERSION}", "nixl==1.5.1", "torch==2.13.0"),
)
TIMEOUT_S = 600.0  # for one step
_WORKS = "import modelexpress, modelexpress_rl, nixl, torch"
_MADE = ".made"


class CannotMake(Exception):
    """The environment can't be made here; says which step failed and what pip said."""


def folder() -> Path:
    """Where the environment is, or will be.

    Raises:
        CannotMake: MX_INTEROP_VENV says that there shall be none.
    """
    given = os.environ.get("MX_INTEROP_VENV", "").strip()
    if given.lower() == "off":
        raise CannotMake("MX_INTEROP_VENV=off")
    if given:
        return Path(given).absolute()
    cache = os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache"
    what = hashlib.sha256(f"{STEPS}{sys.version_info[:2]}".encode()).hexdigest()[:8]
    return Path(cache, "modelexpress-rl", f"interop-{VERSION}-{what}")


def make(where: Path, timeout_s: float = TIMEOUT_S) -> Path:
    """Make the environment unless it is there; returns its Python.

    Several processes may ask at once: one makes it, the others wait.

    Raises:
        CannotMake: a package is not to be had, a step took longer than `timeout_s`, or the folder can't
            be written.
    """
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        with open(where.parent / f"{where.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (where / _MADE).exists():
                _make(where, timeout_s)
    except OSError as error:
        raise CannotMake(f"{where}: {error}") from error
    return _python(where)


def _python(where: Path) -> Path:
    return where / "bin" / "python"


def _make(where: Path, timeout_s: float) -> None:
    shutil.rmtree(where, ignore_errors=True)  # what an interrupted run left
    python = str(_python(where))
    try:
        _run([sys.executable, "-m", "venv", str(where)], timeout_s)
        for packages in STEPS:
            _run([python, "-m", "pip", "install", "--quiet", *packages], timeout_s)
        _run([python, "-P", "-c", _WORKS], timeout_s, cwd=where)
    except CannotMake:
        shutil.rmtree(where, ignore_errors=True)
        raise
    (where / _MADE).touch()


def _run(command: list[str], timeout_s: float, cwd: Path | None = None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotMake(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise CannotMake(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    try:
        print(make(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else folder()))
    except CannotMake as error:
        sys.exit(str(error))
