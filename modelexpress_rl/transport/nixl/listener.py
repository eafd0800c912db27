"""NIXL's metadata listener: which port it takes, whether it took it, and how peers reach it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelexpress_rl.errors import UsageError

ATTEMPTS = 16
VERIFY_TIMEOUT_S = 5.0
_LISTEN = "0A"


def open_on_port(make: Callable[[int], Any], configured: int) -> tuple[Any, int]:
    """Make an agent that listens: on the `configured` port, or on a free one where that is 0.

    Between choosing a free port and NIXL's taking it another process may take it, so it is checked
    that this process owns the listening socket, and another port is tried otherwise.

    Raises:
        UsageError: the configured port is taken, or no free one could be had.
    """
    reason: BaseException | None = None
    for _ in range(1 if configured else ATTEMPTS):
        port = configured or _free_port()
        if configured and configured in _own_listening_ports():
            break
        try:
            agent = make(port)
        except RuntimeError as error:
            reason = error
            continue
        if _listens(port):
            return agent, port
        del agent
    if configured:
        raise UsageError(
            f"port {configured} for the NIXL metadata listener is taken or not allowed; free it, set "
            "MX_METADATA_PORT to another (this agent uses MX_METADATA_PORT plus its device index), or unset "
            "MX_METADATA_PORT to have a free port chosen"
        ) from reason
    raise UsageError(f"no free port for the NIXL metadata listener in {ATTEMPTS} attempts") from reason


def endpoint(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    """Whether this process listens on `port`; polled, because NIXL's thread may not have come to it."""
    if not Path("/proc/net/tcp").exists():
        return True
    deadline = time.monotonic() + VERIFY_TIMEOUT_S
    while port not in _own_listening_ports():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _own_listening_ports() -> set[int]:
    """TCP ports on which sockets of this process listen."""
    mine = _own_socket_inodes()
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in _rows(table):
            address, state, inode = row[1], row[3], row[9]
            if state == _LISTEN and inode in mine:
                ports.add(int(address.rpartition(":")[2], 16))
    return ports


def _rows(table: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(table).read_text().splitlines()[1:]]
    except OSError:
        return []


def _own_socket_inodes() -> set[str]:
    inodes = set()
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return set()
    for each in descriptors:
        try:
            target = os.readlink(f"/proc/self/fd/{each}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes
