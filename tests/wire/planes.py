"""Clients of servers, and what is asked of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from modelexpress_rl import rpc
from modelexpress_rl._pb import refit_pb2 as refit
from tests.wire.fake_server import STAGING

ROOT = Path(__file__).resolve().parents[2]


def plane_at(url: str, timeout_s: float = 5.0) -> rpc.ControlPlane:
    return rpc.ControlPlane(rpc.parse_address(url), rpc_timeout_s=timeout_s)


def version(uid: str, state: int = STAGING) -> refit.WeightVersion:
    return refit.WeightVersion(uid=uid, model_name="m", idempotency_key=uid, state=state)  # type: ignore[arg-type]


def get(uid: str) -> refit.GetWeightVersionRequest:
    return refit.GetWeightVersionRequest(uid=uid)


REGISTER = refit.RegisterWorkerRequest(ttl_seconds=1)


@contextlib.contextmanager
def served_process(port: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.wire.fake_server", str(port)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
