"""Who may talk to a server, and how: TLS, client certificates, bearer tokens, and where it may listen.

TLS alone keeps others from listening in, and lets everybody in. So what makes an address beyond this
host acceptable is that callers must prove who they are: by a token, or by a certificate.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from modelexpress_rl.errors import UsageError
from modelexpress_rl.rpc.auth import AUTHORIZATION, AcceptedTokens
from modelexpress_rl.rpc.files import NamedFile, Rotating
from modelexpress_rl.rpc.tls import TlsFiles, server_context, server_files
from modelexpress_rl.server.observer import NOBODY, Observer

_LOG = logging.getLogger(__name__)

CERT, KEY, CLIENT_CA, TOKENS = "--tls-cert", "--tls-key", "--tls-client-ca", "--auth-token-file"
INSECURE = "--insecure"
_OPEN = "/grpc.health.v1.Health/"


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """What a server demands of its callers; by default nothing.

    With `tls.ca` each needs a certificate that one of those CAs signed, with `tokens` one of that
    file's tokens. Health is answered to everybody who gets as far as a call. `insecure` lets a server
    that demands nothing listen beyond this host. All files are read again when they change.
    """

    tls: TlsFiles | None = None
    tokens: NamedFile | None = None
    insecure: bool = False

    @classmethod
    def of(
        cls,
        *,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        client_ca: str | Path | None = None,
        token_file: str | Path | None = None,
        insecure: bool = False,
    ) -> ServerSecurity:
        """From paths, as the options of `mx-rl serve` give them.

        Raises:
            UsageError: some belong together and are not all given, or one can't be used.
        """
        files = TlsFiles(NamedFile.of(CERT, cert), NamedFile.of(KEY, key), NamedFile.of(CLIENT_CA, client_ca))
        tls = server_files(files, CERT, KEY) if files.present else None
        if tls is not None:
            server_context(tls)  # grpc would only say that it failed
        tokens = NamedFile.of(TOKENS, token_file)
        if tokens is not None:
            AcceptedTokens(tokens)
        return cls(tls, tokens, insecure)

    @property
    def identifies(self) -> bool:
        """Whether a caller has to prove who it is."""
        return self.tokens is not None or (self.tls is not None and self.tls.ca is not None)

    def require_safe(self, host: str) -> None:
        """Refuse an address that others can reach, where they need not prove who they are.

        Raises:
            UsageError: so it is, and `insecure` is not set.
        """
        if is_loopback(host):
            return
        if not self.identifies and not self.insecure:
            raise UsageError(
                f"--host {host} can be reached from other hosts, and any caller could create and delete "
                f"versions: demand a token ({TOKENS}) or a client certificate ({CERT}, {KEY} and "
                f"{CLIENT_CA}), or say {INSECURE}"
            )
        if not self.identifies:
            _LOG.warning("%s: every host that reaches %s may create and delete versions", INSECURE, host)
        elif self.tls is None:
            _LOG.warning("without %s and %s tokens pass over the network in the clear", CERT, KEY)

    def interceptors(self, observer: Observer = NOBODY) -> Sequence[grpc.aio.ServerInterceptor]:
        """What a server has to be made with.

        Raises:
            UsageError: the token file can't be used.
        """
        return [] if self.tokens is None else [_TokenGate(AcceptedTokens(self.tokens), observer)]

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Bind `address`, with TLS where it is asked for; answers the port.

        Raises:
            UsageError: a certificate or key can't be used.
            RuntimeError: the address can't be bound.
        """
        if self.tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _credentials(self.tls))


PLAIN = ServerSecurity()
"""Demands nothing, for servers on this host only."""


def is_loopback(host: str) -> bool:
    """Whether only this host can reach it; a name counts where all its addresses do."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False  # binding it will say what is wrong
    return bool(found) and all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found)


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    def configuration() -> Any:
        server_context(tls)  # the pair may be half-way through a rotation
        assert tls.cert is not None
        assert tls.key is not None
        return grpc.ssl_server_certificate_configuration(
            [(tls.key.read(), tls.cert.read())], None if tls.ca is None else tls.ca.read()
        )

    rotating = Rotating(tls.present, configuration)
    first = rotating.current()
    return grpc.dynamic_ssl_server_credentials(
        first,
        _Changes(rotating.current, first).next,
        require_client_authentication=tls.ca is not None,
    )


class _Changes:
    """What a function answers, where that is another object than the last time, and None where it isn't.

    gRPC asks at each connection, under a lock, and replaces its TLS context by whatever it is given,
    while other threads begin handshakes by the one before: given it each time, two connections at once
    crash the process. Given it only when it changed, and after the threads that hold the old one must
    have begun theirs, none does.
    """

    def __init__(self, current: Callable[[], Any], told: Any, *, settle_s: float = 0.05) -> None:
        self._current = current
        self._told = told
        self._settle_s = settle_s

    def next(self) -> Any:
        """The present object, once; None until there is another. Called from gRPC's threads."""
        present = self._current()
        if present is self._told:
            return None
        time.sleep(self._settle_s)
        self._told = present
        return present


class _TokenGate(grpc.aio.ServerInterceptor):
    """Refuses callers without an accepted token, before their request is read."""

    def __init__(self, tokens: AcceptedTokens, observer: Observer) -> None:
        self._tokens = tokens
        self._observer = observer

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The method's handler, or one that answers UNAUTHENTICATED."""
        handler = await continuation(handler_call_details)
        path: str = handler_call_details.method
        if handler is None or path.startswith(_OPEN):
            return handler
        refusal = self._tokens.accept(_authorization(handler_call_details.invocation_metadata))
        if refusal is None:
            return handler
        method = path.rpartition(".")[2]
        self._observer.rpc_began(method)
        self._observer.rpc_ended(method, grpc.StatusCode.UNAUTHENTICATED.name, 0.0, stream=False)
        _LOG.info("%s: UNAUTHENTICATED: %s", method, refusal)

        async def refuse(requests: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

        return grpc.stream_stream_rpc_method_handler(refuse)


def _authorization(metadata: Any) -> str | None:
    for key, value in metadata or ():
        if key == AUTHORIZATION:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None
