"""`mx-rl serve`: the control plane as a process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterable

import anyio

from modelexpress_rl import logs
from modelexpress_rl.cli.supervise import require_shared_store, supervise
from modelexpress_rl.errors import UsageError
from modelexpress_rl.server import security
from modelexpress_rl.server.app import serving
from modelexpress_rl.server.security import ServerSecurity
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores import open_store, shown

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    spans = "a span: 500ms, 30s, 5m, 1h, 1d, or a number of seconds"
    default = Settings()
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8001, help="port, 0 for a free one (%(default)s)")
    parser.add_argument(
        "--store",
        default="memory",
        help="memory; sqlite:PATH, which survives restarts; redis://HOST:PORT/DB, for any number of servers "
        "(rediss:// for TLS, redis-cluster://HOST:PORT,HOST:PORT for a cluster, ?password_file=PATH to keep "
        "a password out of the command line) (%(default)s)",
    )
    parser.add_argument(
        "--drain-deadline",
        type=span_ms,
        default=default.drain_deadline_ms,
        metavar="SPAN",
        help=f"how long the leases of a released version are still renewed (5m); {spans}",
    )
    parser.add_argument(
        "--retention",
        type=span_ms,
        default=default.retention_ms,
        metavar="SPAN",
        help="how long retired versions and expired workers are still known (1h)",
    )
    parser.add_argument(
        "--max-lease-ttl",
        type=span_ms,
        default=default.max_lease_ttl_ms,
        metavar="SPAN",
        help="the longest lease that is granted (5m)",
    )
    parser.add_argument(
        "--keep-last",
        type=int,
        default=default.keep_last,
        metavar="K",
        help="release a model's versions that are older than its K newest READY ones (0: never)",
    )
    parser.add_argument(
        "--keep-last-for",
        type=_model_and_count,
        action="append",
        default=[],
        metavar="MODEL=K",
        help="--keep-last for one model; may be given several times",
    )
    for option, value, what in (
        ("--max-versions-per-model", default.max_versions_per_model, "versions that are not retired"),
        ("--max-shards-per-version", default.max_shards_per_version, "publications, replicas included"),
        ("--max-workers-per-model", default.max_workers_per_model, "workers that are remembered"),
    ):
        parser.add_argument(option, type=int, default=value, metavar="N", help=f"quota: {what} (%(default)s)")
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="server processes on this one port, for more than one core; needs a Redis store (%(default)s)",
    )
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve Prometheus metrics, /healthz and /readyz here, 0 for a free port; each of --workers "
        "has a port of its own, counted up from this one (off)",
    )
    _add_security(parser)
    parser.add_argument("--log-level", choices=logs.LEVELS, default="info", help="(%(default)s)")
    parser.add_argument("--log-format", choices=logs.FORMATS, default="text", help="(%(default)s)")


def _model_and_count(text: str) -> tuple[str, int]:
    model_name, equals, count = text.rpartition("=")
    if not (equals and model_name and count.isascii() and count.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL=K, such as org/model=3")
    return model_name, int(count)


def _add_security(parser: argparse.ArgumentParser) -> None:
    options = (
        (security.CERT, "tls_cert", "certificate chain (PEM): callers then need TLS"),
        (security.KEY, "tls_key", "its key (PEM, unencrypted)"),
        (security.CLIENT_CA, "tls_client_ca", "CAs (PEM) of which every caller needs a certificate"),
        (security.TOKENS, "auth_token_file", "tokens, one a line, of which every caller needs one"),
    )
    for option, name, text in options:
        parser.add_argument(option, dest=name, metavar="FILE", help=f"{text}; read again when it changes")
    parser.add_argument(
        security.INSECURE,
        action="store_true",
        help="listen beyond this host although callers need not prove who they are",
    )


def security_of(options: argparse.Namespace) -> ServerSecurity:
    """What the options ask for; also whether they allow to listen on `--host`.

    Raises:
        UsageError: they contradict each other, a file can't be used, or the host may not be listened on.
    """
    asked = ServerSecurity.of(
        cert=options.tls_cert,
        key=options.tls_key,
        client_ca=options.tls_client_ca,
        token_file=options.auth_token_file,
        insecure=options.insecure,
    )
    asked.require_safe(options.host)
    return asked


def span_ms(text: str) -> int:
    """Milliseconds of `500ms`, `30s`, `5m`, `1h`, `1d`, or of a number of seconds.

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :] or "s"
    try:
        return round(float(number) * _UNITS_MS[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a span: 500ms, 30s, 5m, 1h, 1d, or a number of seconds"
        ) from error


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; answers the exit status.

    Raises:
        UsageError: a setting makes no sense, the port is taken, or the store can't be opened.
    """
    logs.configure(options.log_format, options.log_level)
    for name, port in (("--port", options.port), ("--metrics-port", options.metrics_port or 0)):
        if not 0 <= port <= 65_535:
            raise UsageError(f"{name} must be between 0 and 65535, not {port}")
    require_shared_store(options.workers, options.store)
    settings = _settings(options)
    asked = security_of(options)
    if options.workers > 1:
        return supervise(options)
    anyio.run(_serve, options, settings, asked)
    return 0


def _settings(options: argparse.Namespace) -> Settings:
    try:
        return Settings(
            drain_deadline_ms=options.drain_deadline,
            retention_ms=options.retention,
            max_lease_ttl_ms=options.max_lease_ttl,
            keep_last=options.keep_last,
            keep_last_for=dict(options.keep_last_for),
            max_versions_per_model=options.max_versions_per_model,
            max_shards_per_version=options.max_shards_per_version,
            max_workers_per_model=options.max_workers_per_model,
        )
    except UsageError as error:  # it names the setting; here that is an option
        setting, _, fault = str(error).partition(" ")
        option = setting.removesuffix("_ms").replace("_", "-")
        unit = " (in milliseconds)" if setting.endswith("_ms") else ""
        raise UsageError(f"--{option} {fault}{unit}") from error


async def _serve(options: argparse.Namespace, settings: Settings, asked: ServerSecurity) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        store = open_store(options.store)
        try:
            async with serving(
                store,
                host=options.host,
                port=options.port,
                settings=settings,
                metrics_port=options.metrics_port,
                share_port=options.supervised,
                security=asked,
            ) as running:
                if running.metrics_port is not None:
                    print(f"mx-rl serve: metrics on {options.host}:{running.metrics_port}", flush=True)
                # The last line on stdout: whoever started the process reads the address from it.
                print(
                    f"mx-rl serve: listening on {running.address} (store {shown(options.store)})", flush=True
                )
                why = await _told_to_stop(signals, supervised=options.supervised)
                logging.getLogger(__name__).info("%s: stopping", why)
        finally:
            with anyio.CancelScope(shield=True):
                await store.close()


async def _told_to_stop(signals: AsyncIterable[signal.Signals], *, supervised: bool) -> str:
    """Wait for a signal, or for the end of the supervisor, with which our stdin ends."""
    why = ""
    async with anyio.create_task_group() as tasks:

        async def wait_for_end() -> None:
            nonlocal why
            ended = anyio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(sys.stdin.fileno(), ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(sys.stdin.fileno())
            why = "the supervisor is gone"
            tasks.cancel_scope.cancel()

        if supervised:
            tasks.start_soon(wait_for_end)
        async for number in signals:
            why = signal.Signals(number).name
            break
        tasks.cancel_scope.cancel()
    return why
