"""How the tests drive a program that runs 0.7.0: one JSON object per line in, one out.

In: {"do": name, ...arguments}. Out: {"ok": result}, or {"raised": class, "code": gRPC code or null,
"message": text}. Imports nothing but the standard library and, for codes, whatever raised them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answer until the input ends. Whatever else is printed goes to stderr: stdout is for answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    print(json.dumps({"ok": "up"}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": commands[request.pop("do")](**request)}
        except Exception as error:  # noqa: BLE001 (told to the test)
            answer = raised(error)
        print(json.dumps(answer), file=answers, flush=True)


def raised(error: Exception) -> dict[str, Any]:
    """An exception, as a test sees it: its class, its gRPC code or that of its cause, its message."""
    cause: Any = error
    while cause is not None and not hasattr(cause, "code"):
        cause = cause.__cause__
    code = cause.code() if cause is not None and callable(cause.code) else None
    details = cause.details() if cause is not None and hasattr(cause, "details") else ""
    return {
        "raised": type(error).__name__,
        "code": getattr(code, "name", None),
        "message": f"{error} {details}".strip(),
    }


def choose_ports() -> None:
    """0.7.0 wants to be told its ports, which must be free: some that are."""
    names = ("MX_WORKER_GRPC_PORT", "MX_METADATA_PORT", "MX_REFIT_METADATA_PORT")
    sockets = [socket.socket() for _ in names]
    for name, each in zip(names, sockets, strict=True):
        each.bind(("127.0.0.1", 0))
        os.environ[name] = str(each.getsockname()[1])
    for each in sockets:
        each.close()
