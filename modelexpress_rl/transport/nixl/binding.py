"""The part of NIXL's binding that is used, its environment, and its errors in words.

The binding is entered directly, not through `nixl_agent`, for two reasons. That class fixes the delay
of the progress thread at 0, which makes the thread spin: an idle trainer would lose a whole core. And
its handles release themselves wherever the garbage collector runs, while NIXL must be entered by one
thread only.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.errors import UsageError
from modelexpress_rl.transport.port import Region

# A read that fails says so in an exception; the libraries would also print it, on stdout and stderr.
# The transports of UCX (UCX_TLS) are left alone: its own choice is the fastest (cma between processes of
# one host, 5 GiB/s where tcp has 2; RDMA where there is any), and a choice without tcp may not start.
QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}

# How long the progress thread sleeps at most; it is woken by what arrives, so this costs no latency.
PROGRESS_DELAY_US = 10_000

_MEMORY = {"cpu": "DRAM_SEG", "cuda": "VRAM_SEG"}


def load() -> ModuleType:
    """Import NIXL's binding, quiet unless the user set its log levels.

    Raises:
        UsageError: NIXL is not installed.
    """
    for variable, level in QUIET.items():
        os.environ.setdefault(variable, level)
    raise_exceptions = logging.raiseExceptions
    try:
        return importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise UsageError(
            f"the NIXL transport needs the nixl package, which can't be imported ({error}); install it with "
            "pip install 'modelexpress-rl[nixl]'"
        ) from error
    finally:
        # Importing NIXL switches this off for the whole process.
        logging.raiseExceptions = raise_exceptions


def errors(binding: ModuleType) -> tuple[type[Exception], ...]:
    """Every class that the binding raises."""
    own = [
        value for name, value in vars(binding).items() if name.startswith("nixl") and name.endswith("Error")
    ]
    return (*own, RuntimeError)


def make_agent(binding: ModuleType, name: str, readable: bool, port: int | None) -> Any:
    """A NIXL agent without a backend; `port` is that of its metadata listener, None for no listener.

    Raises:
        RuntimeError: the port is taken.
    """
    config = binding.nixlAgentConfig()
    config.useProgThread = readable
    config.pthrDelay = PROGRESS_DELAY_US
    config.useListenThread = port is not None
    config.listenPort = port or 0
    # The listener's thread and ours enter the agent at the same time.
    config.syncMode = binding.NIXL_THREAD_SYNC_STRICT
    return binding.nixlAgent(name, config)


def add_ucx(binding: ModuleType, agent: Any) -> Any:
    """Start the UCX backend and return its handle.

    Raises:
        UsageError: NIXL has no UCX here, or UCX can't start in this environment.
    """
    plugins = agent.getAvailPlugins()
    if "UCX" not in plugins:
        raise UsageError(f"this build of NIXL has no UCX plugin, only {sorted(plugins)}; install nixl==1.5.1")
    try:
        return agent.createBackend("UCX", {})
    except errors(binding) as error:
        tls = os.environ.get("UCX_TLS")
        cause = (
            f"UCX_TLS={tls} may lack a transport that survives a peer's death; add tcp to it, or unset it"
            if tls
            else "set UCX_LOG_LEVEL=info and NIXL_LOG_LEVEL=INFO to see why"
        )
        raise UsageError(f"NIXL's UCX backend could not start ({error}): {cause}") from error


def registration_lists(binding: ModuleType, regions: list[Region]) -> list[Any]:
    """NIXL's registration lists of `regions`, one per kind of device."""
    rows: dict[str, list[tuple[int, int, int]]] = {}
    for region in regions:
        rows.setdefault(region.device_kind, []).append((region.addr, region.size_bytes, region.device_index))
    return [
        binding.nixlRegDList(getattr(binding, _MEMORY[kind]), np.array(each, np.uint64))
        for kind, each in rows.items()
    ]


def transfer_list(
    binding: ModuleType, kind: str, index: int, addr: NDArray[np.uint64], size_bytes: NDArray[np.uint64]
) -> Any:
    """NIXL's transfer list of runs on one device."""
    rows = np.empty((len(addr), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addr, size_bytes, index
    return binding.nixlXferDList(getattr(binding, _MEMORY[kind]), rows)


def name_in(metadata: bytes) -> str | None:
    """The agent's name that NIXL metadata carries; None where the bytes don't look like metadata.

    Needed before they are loaded: NIXL refuses a restarted peer under a known name, without saying which.
    """
    head = b"nixlSerDes|Agent"
    if not metadata.startswith(head):
        return None
    at = len(head) + 8
    length = int.from_bytes(metadata[len(head) : at], "little")
    name = metadata[at : at + length]
    if not 0 < len(name) == length:
        return None
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None
