"""What the manifest endpoint of a trainer demands of readers: TLS, certificates, tokens, a live lease.

Manifests say where in a trainer's memory the weights lie, and how to read them. By default whoever
reaches the endpoint gets them, as with 0.7; each demand is asked for by a variable of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from ssl import SSLContext
from typing import Protocol

import anyio
from grpclib import GRPCError, Status

from modelexpress_rl import envs
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.clock import MONOTONIC, Clock
from modelexpress_rl.rpc import ControlPlane, NotFound, RpcError, Unimplemented
from modelexpress_rl.rpc.auth import WORKER_TOKEN_VARIABLE, AcceptedTokens
from modelexpress_rl.rpc.endpoint import LEASE_ID_HEADER, WORKER_ID_HEADER
from modelexpress_rl.rpc.files import NamedFile
from modelexpress_rl.rpc.tls import server_context, worker_files

_log = logging.getLogger(__name__)

LEASE_VARIABLE = "MX_MANIFEST_REQUIRE_LEASE"
BELIEVED_MS = 5_000
CONCURRENT_CHECKS = 4
_KEPT_VERSIONS = 16
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Gate(Protocol):
    """Decides whether a caller gets what is served of a version."""

    async def admit(self, version_id: str, metadata: Mapping[str, object]) -> None:
        """Return where it does.

        Raises:
            GRPCError: PERMISSION_DENIED, saying why; UNAVAILABLE where it can't be found out now.
        """
        ...


class OpenGate:
    """Whoever reaches the endpoint gets it."""

    async def admit(self, version_id: str, metadata: Mapping[str, object]) -> None:
        """Admit everybody."""


_EVERYBODY = OpenGate()


class LeaseGate:
    """Admits callers that name a lease which the control plane says is live.

    An answer names every live lease of the version and is believed for at most five seconds, so that a
    thousand readers cost a few questions. A lease that is not among them is asked about, always.
    """

    def __init__(
        self, control: ControlPlane, *, clock: Clock = MONOTONIC, believed_ms: int = BELIEVED_MS
    ) -> None:
        self._control = control
        self._clock = clock
        self._believed_ms = believed_ms
        self._live: dict[str, dict[tuple[str, str], int]] = {}
        self._asking = anyio.CapacityLimiter(CONCURRENT_CHECKS)

    async def admit(self, version_id: str, metadata: Mapping[str, object]) -> None:
        """See `Gate`."""
        holder = _text(metadata.get(LEASE_ID_HEADER)), _text(metadata.get(WORKER_ID_HEADER))
        if not all(holder):
            raise _denied("and the call names none; readers of 0.7 don't send one")
        if self._knows(version_id, holder):
            return
        async with self._asking:
            if self._knows(version_id, holder) or await self._ask(version_id, holder):
                return
        raise _denied(f"and lease {holder[0]} of worker {holder[1]} on version {version_id} is not live")

    def _knows(self, version_id: str, holder: tuple[str, str]) -> bool:
        until_ms = self._live.get(version_id, {}).get(holder)
        return until_ms is not None and self._clock.now_ms() < until_ms

    async def _ask(self, version_id: str, holder: tuple[str, str]) -> bool:
        request = v1.CheckLeaseRequest(version_id=version_id, lease_id=holder[0], worker_id=holder[1])
        sent_ms = self._clock.now_ms()
        try:
            answer = await self._control.check_lease(request)
        except NotFound:
            raise _denied(f"and version {version_id} is not known to the control plane") from None
        except Unimplemented:
            raise _denied("and this control plane can't be asked about leases") from None
        except RpcError as error:
            raise GRPCError(
                Status.UNAVAILABLE, f"{LEASE_VARIABLE}: the lease can't be checked now: {error.code().name}"
            ) from error
        self._remember(version_id, answer, sent_ms)
        return answer.held

    def _remember(self, version_id: str, answer: v1.CheckLeaseResponse, sent_ms: int) -> None:
        self._live.pop(version_id, None)
        while len(self._live) >= _KEPT_VERSIONS:
            del self._live[next(iter(self._live))]
        self._live[version_id] = {
            (lease.lease_id, lease.worker_id): sent_ms
            + min(self._believed_ms, lease.expires_at_unix_ms - answer.now_unix_ms)
            for lease in answer.live_leases
        }


@dataclass(frozen=True, slots=True)
class WorkerSecurity:
    """What an endpoint demands; by default nothing."""

    ssl_context: SSLContext | None = None
    tokens: AcceptedTokens | None = None
    gate: Gate = _EVERYBODY
    demands: bool = False

    @classmethod
    def from_environment(cls, control: ControlPlane, clock: Clock = MONOTONIC) -> WorkerSecurity:
        """What the variables ask for.

        Raises:
            UsageError: a file can't be used, or one is missing that another needs.
        """
        files = worker_files()
        token_file = NamedFile.of(WORKER_TOKEN_VARIABLE, envs.worker_auth_token_path())
        return cls(
            None if files is None else server_context(files),
            None if token_file is None else AcceptedTokens(token_file),
            LeaseGate(control, clock=clock) if envs.manifest_require_lease() else _EVERYBODY,
            readers_must_prove(),
        )

    def tell_if_open(self, advertised_host: str) -> None:
        """Warn once in a process that other hosts may read, where nothing keeps them from it."""
        global _told
        if not self.demands and not _told and advertised_host not in _LOOPBACK:
            _told = True
            _log.warning(
                "whoever reaches %s may read the published weights; %s, %s or MX_WORKER_TLS_CLIENT_CA "
                "keeps strangers out",
                advertised_host,
                LEASE_VARIABLE,
                WORKER_TOKEN_VARIABLE,
            )


_told = False


def readers_must_prove() -> bool:
    """Whether readers of this process's manifests have to show anything.

    NIXL's own metadata listener, which asks nobody for anything, is not started then.
    """
    return bool(envs.manifest_require_lease() or envs.worker_auth_token_path() or envs.worker_tls_client_ca())


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


def _denied(why: str) -> GRPCError:
    return GRPCError(
        Status.PERMISSION_DENIED,
        f"this trainer hands its manifests only to readers with a live lease ({LEASE_VARIABLE}), {why}",
    )
