"""A trainer in a process of its own that refits a `vllm serve`.

`python -m tests.vllm.trainer_process URL STEP...`: a STEP is a checkpoint's folder.
Prints, as JSON, what the server answers after each step.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.vllm.checkpoints import published
from tests.vllm.prompts import PROMPTS, TOKENS
from tests.vllm.trainers import MODEL, trainer

TIMEOUT_S = 120.0


def post(url: str, **body: Any) -> Any:
    """POST a JSON object; answers the one that comes back."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.loads(answer.read() or b"{}")


def answers(url: str) -> list[list[int]]:
    """The tokens that the server takes after each prompt."""
    asked = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
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
    with urllib.request.urlopen(f"{url}/weight_info", timeout=TIMEOUT_S) as info:
        assert json.load(info) == {"weight_version": version_id}


def main(url: str, first: str, *steps: str) -> None:
    with trainer(published(Path(first))) as source:
        post(f"{url}/init_weight_transfer_engine", init_info={"model_name": MODEL})
        for number, step in enumerate((first, *steps)):
            version_id = source.publish(f"step-{number}", published(Path(step)))
            install(url, version_id)
            source.release(version_id)
            print(json.dumps(answers(url)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
