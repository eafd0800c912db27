"""`mx-rl COMMAND` as users run it: in a process of its own, or in a thread where that shows as much."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import anyio
import anyio.to_thread

from modelexpress_rl.cli.main import main

BOUND_S = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def body(self) -> Any:
        """Its one JSON document."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """Its JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


async def mx_rl(*words: str, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command in a thread, with its own event loop: a process costs a second of imports."""
    with anyio.fail_after(BOUND_S):
        return await anyio.to_thread.run_sync(_in_thread, words, environment(env))


def _in_thread(words: tuple[str, ...], env: Mapping[str, str]) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, env, clear=True), redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as end:
            status = int(end.code or 0)
    return Ended(status, out.getvalue(), err.getvalue())


async def mx_rl_process(*words: str, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command in a process of its own."""
    with anyio.fail_after(BOUND_S):
        done = await anyio.run_process(
            [sys.executable, "-m", "modelexpress_rl.cli.main", *words], env=environment(env), check=False
        )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """This process's, without what configures the package."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MX_", "MODEL_"))}
    return {**plain, **(env or {})}
