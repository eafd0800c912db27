"""Every environment variable that the package reads, typed.

Each reader takes the environment at the call, so that nothing depends on import order. A value that
can't be read is a `UsageError` that names the variable, the value and what is accepted. A blank value
counts as unset.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from modelexpress_rl.column_blocks import ACCEPTS as BLOCKS_ACCEPTS
from modelexpress_rl.column_blocks import ColumnBlocks
from modelexpress_rl.errors import UsageError
from modelexpress_rl.topology import ACCEPTS, Topology
from modelexpress_rl.version import WeightPayloadFormat, WeightSource

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

DEFAULT_SERVER_URL = "localhost:8001"
MIB = 2**20


def server_url() -> str:
    """Address of the control plane: MODEL_EXPRESS_URL, else MX_SERVER_ADDRESS, else localhost:8001."""
    return _text("MODEL_EXPRESS_URL") or _text("MX_SERVER_ADDRESS") or DEFAULT_SERVER_URL


def server_url_name() -> str:
    """The variable that `server_url` came from, for error messages."""
    return "MODEL_EXPRESS_URL" if _text("MODEL_EXPRESS_URL") else "MX_SERVER_ADDRESS"


def model_name() -> str | None:
    """MODEL_NAME: the model's identity."""
    return _text("MODEL_NAME")


def heartbeat_interval_s() -> int:
    """MX_HEARTBEAT_INTERVAL_SECS (30)."""
    return _int("MX_HEARTBEAT_INTERVAL_SECS", 30, least=1, most=86_400)


def registration_ttl_s() -> int:
    """Three heartbeat intervals; a registration is renewed at a third of it."""
    return 3 * heartbeat_interval_s()


def worker_host() -> str:
    """MX_WORKER_HOST: the host to advertise; else this host's address towards the control plane."""
    return _text("MX_WORKER_HOST") or own_address()


def worker_grpc_port(device_index: int) -> int:
    """MX_WORKER_GRPC_PORT plus the device index; 0 where unset: the kernel chooses a free one."""
    return _port("MX_WORKER_GRPC_PORT", device_index)


def metadata_port(device_index: int) -> int:
    """MX_METADATA_PORT plus the device index; 0 where unset."""
    return _port("MX_METADATA_PORT", device_index)


def topology() -> Topology:
    """MX_TOPOLOGY: labels of where this process runs, such as zone=a,rack=r7; none where unset."""
    return _read("MX_TOPOLOGY", _parsed(Topology.parse), ACCEPTS) or Topology()


def trainer_staging_mode() -> str:
    """MX_TRAINER_STAGING_MODE (IN_PLACE): the name of a TrainerStagingMode."""
    names = ("IN_PLACE", "COPY_TO_DEVICE", "COPY_TO_HOST", "WRITE_TO_STORAGE")
    return _choice("MX_TRAINER_STAGING_MODE", names) or "IN_PLACE"


def trainer_overlap() -> str:
    """MX_TRAINER_OVERLAP (NONE): the name of a TrainerOverlap."""
    return _choice("MX_TRAINER_OVERLAP", ("NONE", "PUBLISH", "CAPTURE")) or "NONE"


def trainer_generations() -> int:
    """MX_TRAINER_GENERATIONS (2): how many arenas a copying trainer has."""
    return _int("MX_TRAINER_GENERATIONS", 2, least=1, most=1024)


def trainer_max_generations() -> int | None:
    """MX_TRAINER_MAX_GENERATIONS: how many arenas it may grow to; None where unset."""
    return _read("MX_TRAINER_MAX_GENERATIONS", _between(1, 1024), _range_text(1, 1024))


def trainer_back_pressure() -> str:
    """MX_TRAINER_BACK_PRESSURE (WAIT): the name of a BackPressure."""
    return _choice("MX_TRAINER_BACK_PRESSURE", ("WAIT", "SKIP", "GROW")) or "WAIT"


def column_blocks() -> ColumnBlocks | None:
    """MX_TRAINER_COLUMN_BLOCKS: in how many blocks of columns a copying trainer stores which tensors."""
    return _read("MX_TRAINER_COLUMN_BLOCKS", _parsed(ColumnBlocks.parse), BLOCKS_ACCEPTS)


def weight_payload_format() -> WeightPayloadFormat:
    """MX_WEIGHT_PAYLOAD_FORMAT (FULL_TENSOR)."""
    names = tuple(each.value for each in WeightPayloadFormat if each is not WeightPayloadFormat.UNSPECIFIED)
    return WeightPayloadFormat(_choice("MX_WEIGHT_PAYLOAD_FORMAT", names) or "FULL_TENSOR")


def transfer_timeout_s() -> float:
    """MX_TRANSFER_TIMEOUT (900): seconds for one transfer."""
    return _float("MX_TRANSFER_TIMEOUT", 900.0, above=0.0)


def transport_cost_file() -> str:
    """MX_TRANSPORT_COST_FILE (transport-cost.json in modelexpress_rl of the user's cache directory).

    Where `mx-rl bench transport` stores what it measured, and from where reads are planned.
    """
    return _text("MX_TRANSPORT_COST_FILE") or os.path.join(
        _cache_home(), "modelexpress_rl/transport-cost.json"
    )


def transport_cost_file_is_named() -> bool:
    """Whether MX_TRANSPORT_COST_FILE is set: the file must then be there."""
    return _text("MX_TRANSPORT_COST_FILE") is not None


def explain_dir() -> str | None:
    """MX_EXPLAIN_DIR: where generators write what each new plan of theirs reads, for `mx-rl explain`."""
    return _text("MX_EXPLAIN_DIR")


def reshard_publish_digest() -> bool:
    """MX_RESHARD_PUBLISH_DIGEST (0): publish a digest of every shard."""
    return _bool("MX_RESHARD_PUBLISH_DIGEST", default=False)


def refit_timing() -> bool:
    """MX_REFIT_TIMING (1): write a JSON line to the log for every refit."""
    return _bool("MX_REFIT_TIMING", default=True)


def generator_source_order() -> tuple[WeightSource, ...]:
    """MX_GENERATOR_SOURCE_ORDER: sources to try, in this order; empty where unset."""
    name = "MX_GENERATOR_SOURCE_ORDER"
    accepts = f"distinct names out of {', '.join(WeightSource)}, separated by commas"
    return _read(name, _source_order, accepts) or ()


def refit_delta_bucket_bytes() -> int:
    """MX_REFIT_DELTA_BUCKET_BYTES (512 MiB)."""
    return _int("MX_REFIT_DELTA_BUCKET_BYTES", 512 * MIB, least=1)


def refit_delta_workers() -> int:
    """MX_REFIT_DELTA_WORKERS (as many as there are processors, at most 32)."""
    return _int("MX_REFIT_DELTA_WORKERS", min(32, os.cpu_count() or 1), least=1)


def refit_full_checkpoint_batch_bytes() -> int:
    """MX_REFIT_FULL_CHECKPOINT_BATCH_BYTES (4 GiB)."""
    return _int("MX_REFIT_FULL_CHECKPOINT_BATCH_BYTES", 4096 * MIB, least=1)


def refit_checksum_format() -> str:
    """MX_REFIT_CHECKSUM_FORMAT (adler32)."""
    return _choice("MX_REFIT_CHECKSUM_FORMAT", ("adler32",), upper=False) or "adler32"


@dataclass(frozen=True, slots=True)
class S3Tuning:
    """How object storage is read and written; sizes in bytes."""

    multipart_threshold_bytes: int
    multipart_part_bytes: int
    upload_workers: int
    download_workers: int
    range_threshold_bytes: int
    range_bytes: int
    pool_connections: int
    max_attempts: int
    keepalive: bool


def s3_tuning() -> S3Tuning:
    """The MX_S3_* variables."""
    return S3Tuning(
        multipart_threshold_bytes=_int("MX_S3_MULTIPART_THRESHOLD_BYTES", 100 * MIB, least=1),
        # S3 itself refuses parts under 5 MiB.
        multipart_part_bytes=_int("MX_S3_MULTIPART_PART_BYTES", 16 * MIB, least=5 * MIB),
        upload_workers=_int("MX_S3_UPLOAD_WORKERS", 8, least=1),
        download_workers=_int("MX_S3_DOWNLOAD_WORKERS", 16, least=1),
        range_threshold_bytes=_int("MX_S3_RANGE_THRESHOLD_BYTES", 100 * MIB, least=1),
        range_bytes=_int("MX_S3_RANGE_BYTES", 8 * MIB, least=1),
        pool_connections=_int("MX_S3_POOL_CONNECTIONS", 32, least=1),
        max_attempts=_int("MX_S3_MAX_ATTEMPTS", 5, least=1),
        keepalive=_bool("MX_S3_KEEPALIVE", default=True),
    )


def auth_token_path() -> str | None:
    """MX_AUTH_TOKEN_PATH: a file with the bearer token for the control plane."""
    return _text("MX_AUTH_TOKEN_PATH")


def tls_ca() -> str | None:
    """MX_TLS_CA: a file with the CAs to trust, of the control plane and of workers; else the system's."""
    return _text("MX_TLS_CA")


def tls_cert() -> str | None:
    """MX_TLS_CERT: a file with the certificate to present to servers that demand one."""
    return _text("MX_TLS_CERT")


def tls_key() -> str | None:
    """MX_TLS_KEY: a file with the key of MX_TLS_CERT."""
    return _text("MX_TLS_KEY")


def tls_server_name() -> str | None:
    """MX_TLS_SERVER_NAME: the name that the control plane's certificate must hold; else the dialled host."""
    return _text("MX_TLS_SERVER_NAME")


def tls_worker_name() -> str | None:
    """MX_TLS_WORKER_NAME: the name that workers' certificates must hold; else the host that is dialled."""
    return _text("MX_TLS_WORKER_NAME")


def worker_tls_cert() -> str | None:
    """MX_WORKER_TLS_CERT: a file with the certificate of this worker's endpoint, which then speaks TLS."""
    return _text("MX_WORKER_TLS_CERT")


def worker_tls_key() -> str | None:
    """MX_WORKER_TLS_KEY: a file with the key of MX_WORKER_TLS_CERT."""
    return _text("MX_WORKER_TLS_KEY")


def worker_tls_client_ca() -> str | None:
    """MX_WORKER_TLS_CLIENT_CA: a file with the CAs of which readers of this worker need a certificate."""
    return _text("MX_WORKER_TLS_CLIENT_CA")


def worker_auth_token_path() -> str | None:
    """MX_WORKER_AUTH_TOKEN_PATH: a file with the tokens that workers demand of readers, and readers send."""
    return _text("MX_WORKER_AUTH_TOKEN_PATH")


def manifest_require_lease() -> bool:
    """MX_MANIFEST_REQUIRE_LEASE (0): hand manifests only to readers that hold a live lease."""
    return _bool("MX_MANIFEST_REQUIRE_LEASE", default=False)


def local_rank() -> int | None:
    """LOCAL_RANK: the device index."""
    return _optional_int("LOCAL_RANK")


def rank() -> int | None:
    """RANK: the global rank."""
    return _optional_int("RANK")


def _cache_home() -> str:
    home = _text("XDG_CACHE_HOME")
    return home if home and os.path.isabs(home) else os.path.expanduser("~/.cache")


def _text(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None


def _read(name: str, convert: Callable[[str], T], accepts: str) -> T | None:
    text = _text(name)
    if text is None:
        return None
    try:
        return convert(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}; it accepts {accepts}") from None


def _parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The same, with a `UsageError` that names no variable turned into one that `_read` makes."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except UsageError as error:
            raise ValueError from error

    return convert


def _int(name: str, default: int, *, least: int, most: int = 2**62) -> int:
    value = _read(name, _between(least, most), _range_text(least, most))
    return default if value is None else value


def _optional_int(name: str) -> int | None:
    return _read(name, _between(0, 2**62), _range_text(0, 2**62))


def _port(name: str, device_index: int) -> int:
    most = 65_535 - device_index
    return _int(name, -device_index, least=1, most=most) + device_index


def _float(name: str, default: float, *, above: float) -> float:
    def convert(text: str) -> float:
        value = float(text)
        if not above < value < float("inf"):
            raise ValueError
        return value

    value = _read(name, convert, f"a number above {above:g}")
    return default if value is None else value


def _bool(name: str, *, default: bool) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}

    def convert(text: str) -> bool:
        if text.lower() not in words:
            raise ValueError
        return words[text.lower()]

    value = _read(name, convert, "1, true, yes, on, 0, false, no or off")
    return default if value is None else value


def _choice(name: str, names: tuple[str, ...], *, upper: bool = True) -> str | None:
    def convert(text: str) -> str:
        wanted = text.upper() if upper else text.lower()
        if wanted not in names:
            raise ValueError
        return wanted

    return _read(name, convert, ", ".join(names))


def _between(least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError
        return value

    return convert


def _range_text(least: int, most: int) -> str:
    return f"an integer from {least}" + (f" to {most}" if most < 2**62 else "")


def _source_order(text: str) -> tuple[WeightSource, ...]:
    sources = tuple(WeightSource(part.strip().upper()) for part in text.split(","))
    if len(set(sources)) != len(sources):
        raise ValueError
    return sources


def own_address() -> str:
    """The address that this host uses towards the outside; no packet is sent to find it."""
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
