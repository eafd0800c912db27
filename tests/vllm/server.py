"""A `vllm serve` of tests: started, asked over HTTP, ended."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.e2e.processes import running
from tests.vllm.prompts import BLOCK, PROMPTS, TOKENS

START_S = 300.0
TIMEOUT_S = 120.0
# Before vLLM is imported. Processes are started anew: a fork would take our threads' locks with it.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "MX_WORKER_HOST": "127.0.0.1",
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def serving(checkpoint: Path, ranks: int = 1, *more: str) -> Iterator[str]:
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
    command += ["--enforce-eager", "--tokens-only", "--skip-tokenizer-init", *more]
    command += [str(part) for option in options.items() for part in option]
    with running(command, {"VLLM_SERVER_DEV_MODE": "1"}) as server:
        server.wait_for_line("Application startup complete", START_S)
        _wait_until_it_listens(port)
        yield f"http://127.0.0.1:{port}"


def _wait_until_it_listens(port: int) -> None:
    """The line that says that it started comes before it listens."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def post(url: str, **body: Any) -> Any:
    """POST a JSON object; answers the one that comes back."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.loads(answer.read() or b"{}")


def answers(url: str, tokens: int = TOKENS) -> list[list[int]]:
    """So many tokens that the server takes after each prompt."""
    asked = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    found = []
    for prompt in PROMPTS:
        answer = post(f"{url}/inference/v1/generate", token_ids=prompt, sampling_params=asked)
        found.append(answer["choices"][0]["token_ids"])
    return found


def install(url: str, version_id: str) -> None:
    """Have the server install a version, between two of its steps."""
    post(f"{url}/pause?mode=keep")
    post(f"{url}/start_weight_update")
    post(f"{url}/update_weights", update_info={"version_id": version_id})
    post(f"{url}/finish_weight_update", weight_version=version_id)
    post(f"{url}/resume")
    assert version_of(url) == version_id


def version_of(url: str) -> str | None:
    """The version that the server says that it serves."""
    with urllib.request.urlopen(f"{url}/weight_info", timeout=TIMEOUT_S) as info:
        version: str | None = json.load(info)["weight_version"]
        return version
