"""Addresses of the control plane and of worker endpoints, as people write them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from modelexpress_rl import arguments
from modelexpress_rl.errors import UsageError

_PLAIN = ("http", "grpc", "dns", "ipv4", "ipv6")
_SECURE = ("https", "grpcs")
_ACCEPTED = "host:port, [ipv6]:port, http://host:port, https://host:port or dns:///host:port"


@dataclass(frozen=True, slots=True)
class Address:
    """A host and port to dial, with or without TLS."""

    host: str
    port: int
    secure: bool = False
    scheme: str | None = field(default=None, compare=False, repr=False)
    """As it was written, so that "without TLS" can be told from "nothing was said"."""
    others: tuple[Address, ...] = ()
    """Further servers of the same store."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return ",".join((f"{host}:{self.port}", *map(str, self.others)))


def parse_addresses(text: str, *, what: str = "address") -> Address:
    """Reads one address or several, separated by commas, of servers that share one store.

    A scheme at the first counts for those without one.

    Raises:
        UsageError: as `parse_address`; or some are to be dialled with TLS and some without.
    """
    first, *others = [part.strip() for part in arguments.text(what, text).split(",")]
    address = parse_address(first, what=what)
    prefix = f"{address.scheme}://" if address.scheme in ("http", "https", "grpc", "grpcs") else ""
    rest: list[Address] = []
    for other in others:
        parsed = parse_address(other if "://" in other else prefix + other, what=what)
        if parsed.secure is not address.secure:
            raise UsageError(f"{what}: {text!r} has servers with TLS and servers without")
        if parsed not in (address, *rest):
            rest.append(parsed)
    return replace(address, others=tuple(rest))


def parse_address(text: str, *, what: str = "address") -> Address:
    """Reads an address; `what` names it in the error.

    Raises:
        UsageError: it has no host or no port, or more than those.
    """
    scheme, rest = _split_scheme(arguments.text(what, text).strip())
    text = _shown(text)
    if scheme not in (None, *_PLAIN, *_SECURE):
        raise UsageError(f"{what}: {text!r} has an unknown scheme {scheme!r}; expected {_ACCEPTED}")
    host, colon, port = rest.removesuffix("/").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UsageError(f"{what}: {text!r} is ambiguous; write an IPv6 address as [address]:port")
    if not (colon and _is_host(host) and _is_port(port)):
        raise UsageError(f"{what}: {text!r} is not an address; expected {_ACCEPTED}")
    return Address(host, int(port), secure=scheme in _SECURE, scheme=scheme)


def _shown(text: str) -> str:
    """What may be put into an error: no password."""
    head, at, tail = text.rpartition("@")
    return (
        f"{head.partition('://')[0]}://...@{tail}" if at and "://" in head else f"...@{tail}" if at else text
    )


def _split_scheme(text: str) -> tuple[str | None, str]:
    scheme, separator, rest = text.partition("://")
    if separator:
        return scheme.lower(), rest.removeprefix("/")
    scheme, separator, rest = text.partition(":")
    # gRPC's own target form: "dns:host:port". A host of that name has a port only.
    if separator and scheme.lower() in ("dns", "ipv4", "ipv6") and not rest.isdigit():
        return scheme.lower(), rest
    return None, text


def _is_host(host: str) -> bool:
    return bool(host) and not any(mark in host for mark in "/?#@[] ") and host.isascii()


def _is_port(port: str) -> bool:
    return port.isascii() and port.isdigit() and 0 < int(port) < 65536
