"""How far a publisher is: 0 on this host, else 1 and one more for each of our labels that it lacks."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from modelexpress_rl import envs
from modelexpress_rl.inference.sources import Fetched
from modelexpress_rl.reshard.geometry import Source
from modelexpress_rl.rpc import parse_address
from modelexpress_rl.topology import Topology

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Nearness:
    """Tells publishers' distances for one generator, which has `labels`.

    A publisher is on this host where its manifest endpoint has this host's name or address, or that of
    MX_WORKER_HOST.
    """

    def __init__(self, labels: Topology) -> None:
        self._labels = labels
        self._own_hosts: frozenset[str] | None = None

    def distances(self, fetched: Iterable[Fetched]) -> dict[Source, int]:
        """The distance of each publisher, in the order given."""
        return {each.manifest.source: self._distance(each) for each in fetched}

    def _distance(self, fetched: Fetched) -> int:
        host = parse_address(fetched.publication.endpoint, what="manifest_endpoint").host
        return 0 if host.lower() in self._hosts() else 1 + self._labels.unlike(fetched.topology)

    def _hosts(self) -> frozenset[str]:
        if self._own_hosts is None:
            named = (envs.worker_host(), envs.own_address(), socket.gethostname())
            self._own_hosts = frozenset(name.lower() for name in (*named, *_LOOPBACK))
        return self._own_hosts
