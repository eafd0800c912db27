"""The address of a Redis store, and what is shown of it: never a password."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from modelexpress_rl.errors import UsageError

Endpoint: TypeAlias = tuple[str, int]
"""Host and port."""

DEFAULT_PORT = 6379
_KINDS = {
    "redis": (False, False),
    "rediss": (False, True),
    "redis-cluster": (True, False),
    "rediss-cluster": (True, True),
}
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
FORMS = "redis://HOST:PORT/DB, rediss:// for TLS, or redis-cluster://HOST:PORT,HOST:PORT"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a store is.

    Several endpoints that are no cluster are a primary and its replicas: whichever is the primary now
    is used. `replicas` is how many replicas confirm a commit before it counts as done.
    """

    endpoints: tuple[Endpoint, ...]
    cluster: bool = False
    database: int = 0
    prefix: str = "mx-rl"
    replicas: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_options: tuple[tuple[str, str], ...] = ()

    @property
    def shown(self) -> str:
        """For messages: no credentials."""
        scheme = ("rediss" if self.tls else "redis") + ("-cluster" if self.cluster else "")
        places = ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.endpoints
        )
        return f"{scheme}://{places}" + ("" if self.cluster else f"/{self.database}")

    def connection_options(self) -> dict[str, Any]:
        """What every connection is made with, besides host and port."""
        options: dict[str, Any] = {
            "db": self.database,
            "username": self.username,
            "password": self.password,
        }
        return options | dict(self.tls_options)


def parse(text: str) -> RedisAddress:
    """Understand an address.

    Raises:
        UsageError: it is none; the message shows no password.
    """
    try:
        url = urlsplit(text)
        cluster, tls = _KINDS[url.scheme]
        credentials, _, places = url.netloc.rpartition("@")
        username, _, password = credentials.partition(":")
        options = dict(parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)))
        database = int(url.path.strip("/") or 0)
        endpoints = tuple(_endpoint(place) for place in places.split(","))
    except (ValueError, KeyError) as error:
        raise UsageError(f"the address of the Redis store can't be understood; it is {FORMS}") from error
    if cluster and database:
        raise UsageError(f"a Redis Cluster has database 0 only, not {database}")
    secret_file = options.pop("password_file", None)
    prefix = options.pop("prefix", "mx-rl")
    if not prefix or set(prefix) & set("{}") or not prefix.isprintable() or not prefix.isascii():
        raise UsageError(f"prefix of the Redis store must be printable ASCII without braces, not {prefix!r}")
    return RedisAddress(
        endpoints,
        cluster,
        database,
        prefix,
        _replicas(options.pop("replicas", "0")),
        unquote(username) or None,
        _secret(secret_file) if secret_file is not None else unquote(password) or None,
        tls,
        _tls_options(options, tls),
    )


def _endpoint(place: str) -> Endpoint:
    parts = urlsplit(f"//{place}")
    if not parts.hostname or parts.path or parts.query:
        raise ValueError(place)
    return parts.hostname, parts.port or DEFAULT_PORT


def _replicas(text: str) -> int:
    if not text.isdecimal() or int(text) > 16:
        raise UsageError(f"replicas of the Redis store must be a small whole number, not {text!r}")
    return int(text)


def _secret(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"password_file of the Redis store can't be read: {error}") from error


def _tls_options(options: dict[str, str], tls: bool) -> tuple[tuple[str, str], ...]:
    for name, value in options.items():
        if name not in _TLS_FILES:
            known = ", ".join(("prefix", "replicas", "password_file", *_TLS_FILES))
            raise UsageError(f"the Redis store has no option {name!r}; there are {known}")
        if not tls:
            raise UsageError(f"{name} of the Redis store is for rediss:// only")
        if not Path(value).is_file():
            raise UsageError(f"{name} of the Redis store is no file: {value}")
    return tuple(options.items())
