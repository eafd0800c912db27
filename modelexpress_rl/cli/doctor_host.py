"""What matters of this host to a trainer or a generator: ports, limits, and whether NIXL works."""

from __future__ import annotations

import errno
import importlib.util
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread

from modelexpress_rl import envs
from modelexpress_rl.cli.findings import Finding, fail, ok, skip, warn
from modelexpress_rl.errors import UsageError

NIXL_TIMEOUT_S = 60.0
FILES_LEAST = 4096
# In a process of its own: a transport library that is broken may end the process that loads it.
_TRY_NIXL = """
import anyio, importlib.metadata
from modelexpress_rl.transport.nixl import NixlAgent
async def main():
    agent = await NixlAgent.create("mx-rl-doctor", listen=False)
    await agent.aclose()
    print(importlib.metadata.version("nixl"))
anyio.run(main)
"""


def look_at_ports() -> list[Finding]:
    """The ports that a worker on this host would take, and the address that it would tell others."""
    findings = []
    try:
        host = envs.worker_host()
        device_index = envs.local_rank() or 0
    except UsageError as error:
        return [fail("configuration", str(error), "set it as docs/configuration.md says")]
    if host.startswith("127.") or host in ("localhost", "::1"):
        advice = "others can't read from here: set MX_WORKER_HOST to an address of this host that they reach"
        findings.append(warn("worker host", f"{host} is this host's own", advice))
    else:
        findings.append(ok("worker host", f"workers here are told to others as {host}"))
    readers: tuple[tuple[str, Callable[[int], int], str], ...] = (
        ("MX_WORKER_GRPC_PORT", envs.worker_grpc_port, "the kernel chooses a free port"),
        ("MX_METADATA_PORT", envs.metadata_port, "there is no NIXL metadata listener, and nobody needs one"),
    )
    for name, read, without in readers:
        try:
            findings.append(_port(name, read(device_index), without))
        except UsageError as error:
            findings.append(fail(name, str(error), "set it as docs/configuration.md says"))
    return findings


def _port(name: str, port: int, without: str) -> Finding:
    if not port:
        return ok(name, f"not set: {without}")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        why = "is taken by another process" if error.errno == errno.EADDRINUSE else str(error)
        return fail(name, f"port {port} {why}", f"unset {name} (then {without}), or choose another")
    return ok(name, f"port {port} is free")


def look_at_limits() -> list[Finding]:
    """Open files; and locked memory, where there is hardware that needs it."""
    findings = []
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < FILES_LEAST:
        advice = f"`ulimit -n {FILES_LEAST}` or more before a server or a large job"
        findings.append(warn("open files", f"at most {files}", advice))
    else:
        findings.append(ok("open files", f"at most {files}"))
    if any(Path("/sys/class/infiniband").glob("*")):
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if locked != resource.RLIM_INFINITY:
            advice = "RDMA registers whole models: `ulimit -l unlimited`"
            findings.append(warn("locked memory", f"at most {locked} bytes", advice))
        else:
            findings.append(ok("locked memory", "unlimited"))
    return findings


async def look_at_nixl() -> Finding:
    """Start an agent, as every trainer and generator does."""
    if importlib.util.find_spec("nixl") is None:
        return skip("NIXL", "not installed here; trainers and generators need modelexpress-rl[nixl]")
    return await anyio.to_thread.run_sync(_try_nixl)


def _try_nixl() -> Finding:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY_NIXL],
            capture_output=True,
            text=True,
            timeout=NIXL_TIMEOUT_S,
            env={**os.environ, "MX_METADATA_PORT": ""},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return fail("NIXL", f"an agent did not start within {NIXL_TIMEOUT_S:g} s", "try UCX_LOG_LEVEL=info")
    if done.returncode == 0:
        return ok("NIXL", f"release {done.stdout.split()[-1]}, an agent starts")
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    advice = "UCX_TLS must allow tcp, or be unset; UCX_LOG_LEVEL=info says more"
    return fail("NIXL", f"an agent does not start: {last[:300]}", advice)
