"""What goes wrong in a run, and when: episodes that begin and end, drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.network import Noise
from tests.simulation.transport import Wire

if TYPE_CHECKING:
    from tests.simulation.hosts import Host
    from tests.simulation.world import World

SPANS_S = (0.3, 0.7, 1.2, 2.2, 3.0, 4.5, 7.0, 10.0)
_EPISODES = (4, 11)
_SHARE = 0.3


@dataclass(frozen=True)
class Episode:
    """One fault: from when, for how long."""

    at_s: float
    for_s: float
    kind: str
    begin: Callable[[], None]
    end: Callable[[], None]


class Chaos:
    """Plays episodes in a world."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self.weights: dict[str, float] = dict(_KINDS)

    def plan(self) -> list[Episode]:
        """Draw the episodes of a whole run; few kinds, and therefore often, in each."""
        rng, until_s = self._rng, self._world.options.chaos_s
        kinds = [kind for kind in sorted(self.weights) if rng.random() < _SHARE] or sorted(self.weights)
        episodes: list[Episode] = []
        for _ in range(rng.randint(*_EPISODES)):
            kind = rng.choices(kinds, [self.weights[name] for name in kinds])[0]
            at_s, for_s = rng.uniform(1.0, until_s), rng.choice(SPANS_S)
            episodes.extend(getattr(self, f"_{kind}")(at_s, for_s))
        return sorted(episodes, key=lambda one: one.at_s)

    def play(self, episodes: list[Episode]) -> None:
        """Have them happen."""
        loop = self._world.loop
        for one in episodes:
            loop.in_world(one.at_s, self._begin, one)

    def _begin(self, episode: Episode) -> None:
        world = self._world
        if world.calm:
            return
        world.log.add("*", "%s, for %.1f s", episode.kind, episode.for_s)
        episode.begin()
        world.loop.in_world(episode.for_s, self._end, episode)

    def _end(self, episode: Episode) -> None:
        world = self._world
        if not world.calm:  # then all is mended already
            world.log.add("*", "end of %s", episode.kind)
            episode.end()

    # The kinds.

    def _noise(self, at_s: float, for_s: float) -> Iterator[Episode]:
        rng, world = self._rng, self._world
        noise = Noise(
            drops=rng.choice((0.0, 0.03, 0.1, 0.3)),
            resets=rng.choice((0.0, 0.02, 0.1)),
            duplicates=rng.choice((0.0, 0.1, 0.4)),
            delay_s=rng.choice(((0.0003, 0.004), (0.001, 0.05), (0.0, 0.3), (0.0, 0.8))),
        )

        def begin() -> None:
            world.network.noise = noise
            world.monitor.disturb("")

        def end() -> None:
            world.network.noise = Noise()
            world.monitor.disturb("")

        yield Episode(at_s, for_s, f"noise {noise.drops} {noise.duplicates} {noise.delay_s}", begin, end)

    def _cut_off(self, at_s: float, for_s: float) -> Iterator[Episode]:
        """A client from all servers, or from one."""
        host = self._client()
        servers = [server.name for server in self._world.replicas]
        if self._rng.random() < 0.25:
            servers = [self._rng.choice(servers)]
        way = self._rng.choice(("both", "both", "requests", "replies"))
        yield self._cut(at_s, for_s, host.name, servers, way)

    def _cut_readers(self, at_s: float, for_s: float) -> Iterator[Episode]:
        """A generator from a trainer: neither manifests nor reads."""
        generator, trainer = self._rng.choice(self._world.generators), self._rng.choice(self._world.trainers)
        yield self._cut(at_s, for_s, generator.name, [trainer.name], "both")

    def _isolate(self, at_s: float, for_s: float) -> Iterator[Episode]:
        host = self._rng.choice(self._world.hosts)
        others = [other.name for other in self._world.hosts if other is not host]
        yield self._cut(at_s, for_s, host.name, others, "both")

    def _flapping(self, at_s: float, for_s: float) -> Iterator[Episode]:
        """A trainer is cut off until it asks who is there; then it is heard, and hears nothing."""
        world, host = self._world, self._rng.choice(self._world.trainers)
        network, monitor = world.network, world.monitor
        servers = [server.name for server in world.replicas]
        unanswered = self._rng.choice((0, 0, 1))
        watched, cuts = network.on_message, list[tuple[str, str]]()

        def change_to(pairs: list[tuple[str, str]]) -> None:
            for pair in cuts:
                network.mend(*pair)
            for pair in pairs:
                network.cut(*pair)
            cuts[:] = pairs
            monitor.disturb(host.name, *servers)

        def look(phase: str, source: str, target: str, method: str) -> None:
            nonlocal unanswered
            watched(phase, source, target, method)
            if world.calm or not cuts or (source, method) != (host.name, "GetServerInfo"):
                return
            if phase == "send":
                unanswered -= 1
                if unanswered < 0:
                    change_to([(server, "nobody") for server in servers])
            elif phase == "answer":
                change_to([(server, host.name) for server in servers])

        def begin() -> None:
            nonlocal watched
            watched, network.on_message = network.on_message, look
            change_to([(host.name, s) for s in servers] + [(s, host.name) for s in servers])

        yield Episode(at_s, max(for_s, 7.0), f"flapping of {host.name}", begin, lambda: change_to([]))

    def _cut(self, at_s: float, for_s: float, one: str, others: list[str], way: str) -> Episode:
        network, monitor = self._world.network, self._world.monitor
        pairs = [(one, other) for other in others] if way != "replies" else []
        pairs += [(other, one) for other in others] if way != "requests" else []

        def begin() -> None:
            for pair in pairs:
                network.cut(*pair)
            monitor.disturb(one, *others)

        def end() -> None:
            for pair in pairs:
                network.mend(*pair)
            monitor.disturb(one, *others)

        return Episode(at_s, for_s, f"cut {way} of {one} and {','.join(others)}", begin, end)

    def _crash(self, at_s: float, for_s: float) -> Iterator[Episode]:
        host, silent = self._rng.choice(self._world.hosts), self._rng.random() < 0.3
        yield Episode(
            at_s,
            for_s,
            f"crash of {host.name}",
            partial(self._kill, host, silent),
            partial(self._start, host),
        )

    def _crash_at_commit(self, at_s: float, for_s: float) -> Iterator[Episode]:
        """A server dies just before or just after one of its next commits."""
        host, rng = self._rng.choice(self._world.replicas), self._rng
        after, left = rng.random() < 0.5, rng.randint(1, 5)

        def die() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._kill(host, silent=False)

        def begin() -> None:
            if host.store is not None:
                setattr(host.store, "after_commit" if after else "before_commit", die)

        when = "after" if after else "before"
        yield Episode(at_s, for_s, f"crash of {host.name} {when} a commit", begin, partial(self._start, host))

    def _crash_at_message(self, at_s: float, for_s: float) -> Iterator[Episode]:
        """A client dies as it sends one of its next messages, or hears the answer."""
        host, rng, network = self._client(), self._rng, self._world.network
        at_phase, left = rng.choice(("send", "answer")), rng.randint(1, 6)
        watched = network.on_message

        def die(phase: str, source: str, target: str, method: str) -> None:
            nonlocal left
            watched(phase, source, target, method)
            if (phase, source) == (at_phase, host.name):
                left -= 1
                if left == 0:
                    self._world.loop.in_world(0, self._kill, host, False)

        def begin() -> None:
            nonlocal watched
            watched, network.on_message = network.on_message, die

        yield Episode(
            at_s, for_s, f"crash of {host.name} at a message ({at_phase})", begin, partial(self._start, host)
        )

    def _pause(self, at_s: float, for_s: float) -> Iterator[Episode]:
        host = self._rng.choice(self._world.hosts)
        for_s = self._rng.choice((0.05, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0))
        yield Episode(
            at_s, for_s, f"pause of {host.name}", partial(self._hold, host), partial(self._go_on, host)
        )

    def _lag(self, at_s: float, for_s: float) -> Iterator[Episode]:
        """A registration ends while every server stands still, and it is that of a trainer that is read."""
        rng, ttl_s = self._rng, self._world.options.registration_ttl_s
        trainer = rng.choice(self._world.trainers)
        yield self._reads_take(at_s - 2.0, ttl_s + 4.0, Wire(takes_s=(1.5, 6.0)))
        servers = [server.name for server in self._world.replicas]
        yield self._cut(at_s, ttl_s + for_s, trainer.name, servers, "both")
        stop_at_s, stop_s = at_s + ttl_s - rng.uniform(0.4, 1.0), rng.uniform(0.6, 1.2)
        for host in self._world.replicas:
            yield Episode(
                stop_at_s,
                stop_s,
                f"pause of {host.name}",
                partial(self._hold, host),
                partial(self._go_on, host),
            )

    def _stutter(self, at_s: float, for_s: float) -> Iterator[Episode]:
        """A generator whose event loop is blocked again and again, while it reads slowly."""
        host, rng = self._rng.choice(self._world.generators), self._rng
        lease_s = self._world.options.lease_ttl_s
        until_s = at_s + max(for_s, 6.0)
        yield self._reads_take(at_s - 0.5, until_s - at_s, Wire(takes_s=(0.3 * lease_s, 1.6 * lease_s)))
        while at_s < until_s:
            pause_s = lease_s * rng.uniform(0.1, 1.4)
            yield Episode(
                at_s, pause_s, f"pause of {host.name}", partial(self._hold, host), partial(self._go_on, host)
            )
            at_s += pause_s + lease_s * rng.uniform(0.1, 0.5)

    def _store(self, at_s: float, for_s: float) -> Iterator[Episode]:
        """The store is away, slow, or loses answers."""
        rng, ways = self._rng, self._world.store.ways
        out, loses = rng.random() < 0.4, rng.choice((0.0, 0.1, 0.4))
        latency_s = rng.choice(((0.0002, 0.003), (0.01, 0.1), (0.1, 0.6)))

        def begin() -> None:
            ways.out, ways.loses, ways.latency_s = out, loses, latency_s
            self._world.monitor.disturb("")

        def end() -> None:
            ways.out, ways.loses, ways.latency_s = False, 0.0, (0.0002, 0.003)
            self._world.store.resync()
            self._world.monitor.disturb("")

        yield Episode(at_s, for_s, f"store out={out} loses={loses} {latency_s}", begin, end)

    def _flush(self, at_s: float, for_s: float) -> Iterator[Episode]:
        def begin() -> None:
            self._world.store.flush()
            self._world.monitor.disturb("")

        yield Episode(at_s, for_s, "flush", begin, lambda: None)

    def _held_streams(self, at_s: float, for_s: float) -> Iterator[Episode]:
        network, monitor = self._world.network, self._world.monitor

        def hold(holds: bool) -> None:
            network.holds_streams = holds
            monitor.disturb("")

        yield Episode(at_s, for_s, "streams are held back", partial(hold, True), partial(hold, False))

    def _slow_reads(self, at_s: float, for_s: float) -> Iterator[Episode]:
        rng = self._rng
        takes_s = rng.choice(((0.1, 0.6), (0.5, 2.0), (1.0, 5.0)))
        wire = Wire(takes_s, fails=rng.choice((0.0, 0.2)), damaged=rng.choice((0.0, 0.0, 0.1)))
        yield self._reads_take(at_s, for_s, wire)

    def _reads_take(self, at_s: float, for_s: float, wire: Wire) -> Episode:
        hub = self._world.hub

        def begin() -> None:
            hub.wire = wire

        def end() -> None:
            hub.wire = Wire()

        return Episode(max(at_s, 0.0), for_s, f"slow reads {wire.takes_s} {wire.fails}", begin, end)

    def _indecision(self, at_s: float, for_s: float) -> Iterator[Episode]:
        """Engines give stages up, installs fail half-way, trainers leave before a release."""
        world = self._world

        def set_to(gives_up: float, fails: float, early: bool) -> None:
            for generator in world.generators:
                generator.gives_up, generator.fails_install = gives_up, fails
            for trainer in world.trainers:
                trainer.leaves_early = early

        early = self._rng.random() < 0.5
        yield Episode(
            at_s, for_s, "indecision", partial(set_to, 0.4, 0.3, early), partial(set_to, 0.0, 0.0, False)
        )

    # Steps.

    def _client(self) -> Host:
        world = self._world
        return self._rng.choice([*world.trainers, *world.generators, world.orchestrator])

    def _kill(self, host: Host, silent: bool) -> None:
        if self._world.calm:
            return
        host.crash(silent=silent)
        self._world.monitor.disturb(host.name, *self._reach(host))

    def _start(self, host: Host) -> None:
        host.start()
        self._world.monitor.disturb(host.name, *self._reach(host))

    def _reach(self, host: Host) -> tuple[str, ...]:
        return ("",) if host in self._world.replicas else ()

    def _hold(self, host: Host) -> None:
        host.pause()
        self._world.monitor.disturb(f"pause of {host.name}", host.name, *self._reach(host))

    def _go_on(self, host: Host) -> None:
        host.resume()
        self._world.monitor.disturb(f"pause of {host.name}", host.name, *self._reach(host))


_KINDS = {
    "noise": 3.0,
    "cut_off": 4.0,
    "cut_readers": 1.0,
    "isolate": 1.0,
    "flapping": 1.5,
    "crash": 3.0,
    "crash_at_commit": 1.5,
    "crash_at_message": 2.0,
    "pause": 3.0,
    "lag": 1.5,
    "stutter": 1.5,
    "store": 1.5,
    "flush": 0.5,
    "held_streams": 0.7,
    "slow_reads": 2.0,
    "indecision": 1.0,
}
