"""What can be seen of the control plane from here: its address, TLS, answers, clock and store."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc
from grpc_health.v1 import health_pb2

from modelexpress_rl import envs
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.cli.findings import Finding, fail, ok, skip, warn
from modelexpress_rl.errors import UsageError
from modelexpress_rl.rpc import (
    Address,
    ControlPlane,
    DeadlineExceeded,
    RpcError,
    TlsError,
    TokenFile,
    Unauthenticated,
    Unimplemented,
    parse_addresses,
    tls,
)
from modelexpress_rl.rpc.methods import Unary

SKEW_WARN_S = 1.0
SKEW_FAIL_S = 30.0
SLOW_MS = 100.0
CERT_WARN_DAYS = 14
_HEALTH = Unary(
    "grpc.health.v1.Health", "Check", health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one server said of itself."""

    address: Address
    info: v1.GetServerInfoResponse
    skew_s: float


async def look(server_url: str | None, timeout_s: float) -> list[Finding]:
    """Everything that can be found out about the control plane at this address."""
    what = "--server" if server_url else envs.server_url_name()
    try:
        address = parse_addresses(server_url or envs.server_url(), what=what)
        token_path = envs.auth_token_path()
        token = TokenFile(token_path) if token_path else None
        if token is not None:
            token.metadata()
    except UsageError as error:
        return [fail("configuration", str(error), "set it as docs/configuration.md says")]
    where = "the default" if not server_url and envs.server_url() == envs.DEFAULT_SERVER_URL else what
    findings = [ok("address", f"{address} ({where}{', TLS' if address.secure else ''})")]
    if token is not None:
        findings.append(ok("token", f"{token_path} holds a bearer token"))
    answers: list[_Answer] = []
    for one in (replace(address, others=()), *address.others):
        findings += await _look_at(one, token, timeout_s, answers)
    findings += _together(answers)
    return findings


async def _look_at(
    address: Address, token: TokenFile | None, timeout_s: float, answers: list[_Answer]
) -> list[Finding]:
    reach = await _reach(address, timeout_s)
    findings = [reach]
    if reach.advice:
        return findings
    if address.secure:
        findings.append(await asyncio.to_thread(_certificate, address, timeout_s))
    try:
        plane = ControlPlane(address, rpc_timeout_s=timeout_s, credentials=token)
    except UsageError as error:
        return [*findings, fail("TLS", str(error), "see MX_TLS_* in docs/configuration.md")]
    async with plane:
        try:
            sent_s, began_s = time.time(), time.perf_counter()
            info = await plane.get_server_info(v1.GetServerInfoRequest())
            took_s = time.perf_counter() - began_s
        except Unimplemented:
            advice = "watches poll, releases have the server's deadline, and `mx-rl versions` can't list"
            return [*findings, warn(f"server {address}", "answers, but is of 0.7", advice)]
        except RpcError as error:
            return [*findings, _no_answer(address, error)]
        skew_s = info.now_unix_ms / 1000 - (sent_s + took_s / 2)
        answers.append(_Answer(address, info, skew_s))
        findings += [_answered(address, info, took_s), _clock(address, skew_s, took_s)]
        findings.append(await _store(plane, address, info))
    return findings


async def _reach(address: Address, timeout_s: float) -> Finding:
    subject = f"connection to {address}"
    try:
        async with asyncio.timeout(timeout_s):
            began_s = time.perf_counter()
            _, writer = await asyncio.open_connection(address.host, address.port)
            took_ms = (time.perf_counter() - began_s) * 1000
            peer = writer.get_extra_info("peername")
            writer.close()
    except socket.gaierror as error:
        return fail(
            subject, f"the name {address.host} can't be resolved: {error}", "check the name and the DNS"
        )
    except ConnectionRefusedError:
        advice = f"start `mx-rl serve --port {address.port}` there, or correct the port"
        return fail(subject, "nobody listens there", advice)
    except TimeoutError:
        advice = "a firewall may drop packets to the port, or the host is down"
        return fail(subject, f"no answer within {timeout_s:g} s", advice)
    except OSError as error:
        return fail(subject, str(error), "check the network between the two hosts")
    return ok(subject, f"{peer[0]} port {peer[1]}, {took_ms:.1f} ms")


def _certificate(address: Address, timeout_s: float) -> Finding:
    subject = f"TLS of {address}"
    name = envs.tls_server_name() or address.host
    try:
        context = tls.client_context()
        with (
            socket.create_connection((address.host, address.port), timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=name) as secured,
        ):
            certificate = secured.getpeercert() or {}
            protocol = secured.version()
    except UsageError as error:
        return fail(subject, str(error), "see MX_TLS_* in docs/configuration.md")
    except (ssl.SSLError, OSError) as error:
        words = tls.explained(error, name) or str(error)
        return fail(
            subject, words, f"check {tls.CA_VARIABLE} and {tls.NAME_VARIABLE}, or the server's certificate"
        )
    ends = certificate.get("notAfter")
    if not isinstance(ends, str):
        return ok(subject, f"{protocol}")
    days = (ssl.cert_time_to_seconds(ends) - time.time()) / 86_400
    if days < CERT_WARN_DAYS:
        return warn(
            subject,
            f"the certificate ends in {days:.1f} days, on {ends}",
            "renew it; the server reads it again",
        )
    return ok(subject, f"{protocol}, certificate valid until {ends}")


def _no_answer(address: Address, error: RpcError) -> Finding:
    subject = f"server {address}"
    if isinstance(error, TlsError):
        advice = f"check https:// in the address, {tls.CA_VARIABLE} and {tls.CERT_VARIABLE}"
    elif isinstance(error, Unauthenticated):
        advice = "name a file with a token that the server accepts in MX_AUTH_TOKEN_PATH"
    elif isinstance(error, DeadlineExceeded):
        advice = "it accepts connections and does not answer: is it stopped, overloaded, or something else?"
    elif error.code() is grpc.StatusCode.UNAVAILABLE:
        advice = "is it a control plane? with TLS on only one side the connection ends at once: try https://"
    else:
        advice = "the server's log says more"
    return fail(subject, f"{error.code().name}: {error.details()}", advice)


def _answered(address: Address, info: v1.GetServerInfoResponse, took_s: float) -> Finding:
    took_ms = took_s * 1000
    found = f"release {info.server_version}, store {info.store_kind}, answered in {took_ms:.1f} ms"
    if took_ms > SLOW_MS:
        advice = "renewals and commits wait as long: is the network, the server or its store overloaded?"
        return warn(f"server {address}", found, advice)
    return ok(f"server {address}", found)


def _clock(address: Address, skew_s: float, took_s: float) -> Finding:
    subject = f"clock of {address}"
    found = f"{abs(skew_s):.2f} s {'ahead of' if skew_s > 0 else 'behind'} this host's"
    if abs(skew_s) <= max(SKEW_WARN_S, took_s):
        return ok(subject, found)
    advice = (
        "set both by NTP: deadlines are the store's, and clients of 0.7, logs and `mx-rl` compare them with "
        "this host's clock"
    )
    return (fail if abs(skew_s) > SKEW_FAIL_S else warn)(subject, found, advice)


async def _store(plane: ControlPlane, address: Address, info: v1.GetServerInfoResponse) -> Finding:
    subject = f"store of {address}"
    try:
        answer = await plane.call(_HEALTH, health_pb2.HealthCheckRequest(), None)
    except RpcError as error:
        return skip(subject, f"the health service does not say: {error.code().name}")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        advice = "the server works and its store does not: the server's log and /readyz say why"
        return fail(subject, f"{info.store_kind} does not answer, or the server stops", advice)
    if info.store_kind == "memory":
        advice = "a restart forgets every version: use --store sqlite:PATH or redis://... where that matters"
        return warn(subject, "kept in the server's memory", advice)
    return ok(subject, f"{info.store_kind} answers")


def _together(answers: Sequence[_Answer]) -> list[Finding]:
    """Whether several servers are replicas of one control plane."""
    if len(answers) < 2:
        return []
    stores = {answer.info.store_id for answer in answers}
    if len(stores) > 1:
        kinds = ", ".join(f"{answer.address}: {answer.info.store_kind}" for answer in answers)
        advice = "start all of them with the same --store redis://..."
        return [fail("replicas", f"they don't share a store ({kinds})", advice)]
    return [ok("replicas", f"{len(answers)} servers share one store")]
