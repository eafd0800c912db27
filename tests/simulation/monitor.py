"""P1 to P8, asserted on what really happened: on commits, on memory, on the clock, on what was said.

It sees what no process sees: every buffer, every commit, every process's clock. It asks none of the
machines' guards. The first violation ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.rpc.registration import RegistrationEvent
from modelexpress_rl.server.stores.port import VersionEntry
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient
from modelexpress_rl.train.publication import Publication
from statemachines.installation_records import Leased, Planned, Pulling, Verified
from statemachines.version_records import Ready, Releasing, Retired, VersionRecord
from statemachines.worker import WorkerRecord, WorkerState
from tests.simulation.store import Commit

if TYPE_CHECKING:
    from tests.simulation.generators import GeneratorHost
    from tests.simulation.hosts import Host
    from tests.simulation.trainers import TrainerHost
    from tests.simulation.world import World

_LOOKED_AT_S = 12.0
"""For so long after its reuse a buffer is looked at; by then no reader of it is left in any case."""


@dataclass(frozen=True)
class Violation:
    """Which promise was broken, when, and how."""

    promise: str
    at_s: float
    words: str
    cause: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.promise} at {self.at_s:.3f} s: {self.words}"


@dataclass(eq=False)
class Lent:
    """A buffer that readers may read, of one life of a trainer; `spoil` is what its owner does at the end."""

    owner: str
    uid: str
    digest: str
    spoil: Callable[[], None]
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """Whether its owner has written it again."""
        return self.gone.is_set()


@dataclass(eq=False)
class _Wait:
    who: Host
    what: str
    begun_s: float
    bound_s: float
    disturbed: bool
    over: bool = False


class Monitor:
    """Watches one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[Violation] = []
        self.closed = False
        self._reused: list[tuple[float, Lent]] = []
        self._looked_at = False
        self._deadlines: dict[tuple[str, int], int] = {}
        self._left: set[tuple[str, int]] = set()
        self._records: dict[tuple[str, int, int], VersionRecord] = {}
        self._asked: set[tuple[str, str, str]] = set()
        self._disturbed_s: dict[str, float] = {}
        self._served: dict[str, tuple[object, object]] = {}
        self._landed_ms: dict[str, int] = {}
        world.store.on_commit = self._committed
        world.network.on_request = self.asked
        world.network.on_answer = self._answered
        world.network.on_message = self._message

    def fail(self, promise: str, words: str, cause: BaseException | None = None) -> None:
        """Note a violation and end the run."""
        if self.closed:
            return
        self.violations.append(Violation(promise, self._world.loop.time(), words, cause))
        self._world.log.add("!", "%s: %s", promise, words)
        self._world.loop.stop()

    def _require(self, holds: bool, promise: str, words: str) -> None:
        if not holds and not self.violations:
            self.fail(promise, words)

    # P1: no reuse under a reader.

    def lend(self, host: Host, owner: str, uid: str, digest: str, spoil: Callable[[], None]) -> Lent:
        """A buffer is about to be announced."""
        self._reused = [one for one in self._reused if (one[1].owner, one[1].uid) != (owner, uid)]
        return Lent(owner, uid, digest, spoil)

    def reused(self, lent: Lent) -> None:
        """The fence completed: the owner overwrites the buffer at once."""
        self._world.log.add(lent.owner.split("-")[0], "writes the buffer of %s again", lent.uid)
        lent.spoil()
        lent.gone.set()
        self._reused.append((self._world.loop.time(), lent))
        self._looked_at = False

    def owner_died(self, owner: str) -> None:
        """Its memory went with it, and can't be read."""
        self._reused = [one for one in self._reused if one[1].owner != owner]

    def _check_buffers(self) -> None:
        """Called once more after each commit and each decision: nothing else lets anybody read."""
        self._looked_at = True
        if self._reused and self._reused[0][0] < self._world.loop.time() - _LOOKED_AT_S:
            self._reused.pop(0)
        for _, lent in self._reused:
            self._check_buffer(lent)

    def _check_buffer(self, lent: Lent) -> None:
        about = f"{lent.owner} has written its buffer of {lent.uid} again"
        for host in self._world.generators:
            if host.client is not None and (lent.owner, lent.digest) in _may_read(host, lent.uid):
                self._require(False, "P1", f"{about}, and {host.life} may read it under a live lease")
        stored = self._world.store.records._versions.get(lent.uid)  # type: ignore[call-overload]
        record = None if stored is None else stored.entry.record
        if record is not None and isinstance(record.phase, Ready):
            now_ms = self._world.store.clock.now_ms()
            for shard in record.publications.values():
                if (shard.worker_id, shard.manifest_digest) == (lent.owner, lent.digest):
                    offered = self._is_live(shard.worker_id, shard.life, now_ms)
                    self._require(not offered, "P1", f"{about}, and readers are still sent to it")

    # P2 and P6: what is installed and served.

    def watch_generator(self, host: GeneratorHost, client: AsyncModelExpressGeneratorClient) -> None:
        """See every decision of a generator's machine."""
        installation = client._installation
        feed = installation.feed

        def observed(event: Any) -> None:
            before = installation.record
            feed(event)
            self._decided(host, before, installation.record, type(event).__name__)

        installation.feed = observed  # type: ignore[method-assign]
        self._served[host.life] = (None, None)

    def watch_trainer(self, host: TrainerHost, client: AsyncModelExpressTrainerClient) -> None:
        """Note what a trainer's publications and its registration go through."""
        publications, registration = client._runtime._publications, client._registration
        assert publications is not None
        begin, changed = publications.begin, registration.on_change

        def begun(version_id: str, slot_id: str, content: object) -> tuple[Publication, bool]:
            publication, is_new = begin(version_id, slot_id, content)
            if is_new:
                self._watch_publication(host, publication)
            return publication, is_new

        def told(event: RegistrationEvent) -> None:
            self._world.log.add(host.name, "registration: %s", type(event).__name__)
            changed(event)

        publications.begin = begun  # type: ignore[method-assign]
        registration.on_change = told

    def _watch_publication(self, host: TrainerHost, publication: Publication) -> None:
        handle = publication.handle

        def observed(event: Any) -> None:
            before = publication.state
            handle(event)
            if publication.state != before:
                self._world.log.add(
                    host.name,
                    "publication %s: %s -> %s (%s)",
                    publication.version_id,
                    before,
                    publication.state,
                    type(event).__name__,
                )

        publication.handle = observed  # type: ignore[method-assign]

    def _decided(self, host: GeneratorHost, before: Any, after: Any, event: str) -> None:
        if after.state != before.state:
            self._world.log.add(host.name, "installation: %s -> %s (%s)", before.state, after.state, event)
        if isinstance(before.working, Pulling) and isinstance(after.working, Verified):
            landed_ms = self._landed_ms.get(host.life, 0)
            late_ms, uid = landed_ms - before.working.lease_deadline_ms, after.working.version_id
            self._require(
                late_ms < 0,
                "P2",
                f"{host.life} took {uid}, whose last read ended {late_ms} ms after the lease",
            )
        self._looked_at = False
        self._check_serving(host)

    def landed(self, reader: str, peer: str) -> None:
        """A read has brought all its bytes."""
        for host in self._world.generators:
            if host.life == reader:
                self._landed_ms[reader] = host.clock.now_ms()

    def staged(self, host: GeneratorHost, client: AsyncModelExpressGeneratorClient, handle: Any) -> None:
        """A version is staged, and will be written to the engine as it is."""
        job = client._jobs.get(handle)
        if job is None:
            return
        expected = host.engine.expected(handle.version_id)
        for tensor in job._staged:
            self._require(
                tensor.data.tobytes() == expected[tensor.need.name],
                "P2",
                f"{host.life} staged {handle.version_id}, and {tensor.need.name} is not that version's",
            )

    def _check_serving(self, host: GeneratorHost) -> None:
        client = host.client
        if client is None:
            return
        serving = client.serving_version_id
        state = (serving, tuple(host.engine.parameters.values()))
        if state == self._served.get(host.life):
            return
        self._served[host.life] = state
        if serving is not None:
            self._require(
                host.engine.parameters == host.engine.expected(serving),
                "P6",
                f"{host.life} says that it serves {serving}, and its parameters are not that version's",
            )

    # P3: READY is complete and alive. P4, P7: leases.

    def _committed(self, commit: Commit) -> None:
        self._looked_at = False
        if isinstance(commit.after, WorkerRecord) or isinstance(commit.before, WorkerRecord):
            self._worker_committed(commit)
            return
        before, after = commit.before, commit.after
        assert before is None or isinstance(before, VersionEntry)
        assert after is None or isinstance(after, VersionEntry)
        self._log_version(commit.by, before, after)
        if after is None:
            if before is not None:
                self._check_erased(before.record, commit.now_ms)
            return
        record = after.record
        stored = self._world.store.records._versions[record.uid]
        self._records[record.uid, record.created_at_ms, stored.revision] = record
        if isinstance(record.phase, Ready):
            gap = self._gap(record, commit.now_ms)
            self._require(
                gap is None, "P3", f"{record.uid} is committed READY without a live source of {gap}"
            )
        if before is not None:
            self._check_leases(before.record, record, commit.now_ms)

    def _check_erased(self, record: VersionRecord, now_ms: int) -> None:
        phase = record.phase
        kept = isinstance(phase, Retired) and now_ms < phase.forget_at_ms
        self._require(not kept, "P5", f"{record.uid} was erased before its retention was over")

    def _worker_committed(self, commit: Commit) -> None:
        before, after = commit.before, commit.after
        assert before is None or isinstance(before, WorkerRecord)
        assert after is None or isinstance(after, WorkerRecord)
        if after is None:
            assert before is not None
            lives = before.state is WorkerState.LIVE and commit.now_ms < before.deadline_ms
            self._require(not lives, "P5", f"{before.worker_id} was forgotten while it was registered")
            return
        if after.state is WorkerState.LIVE:
            key = (after.worker_id, after.life)
            self._deadlines[key] = max(after.deadline_ms, self._deadlines.get(key, 0))
        else:
            self._left.add((after.worker_id, after.life))

    def _is_live(self, worker_id: str, life: int, now_ms: int) -> bool:
        key = (worker_id, life)
        return key not in self._left and now_ms < self._deadlines.get(key, 0)

    def _gap(self, record: VersionRecord, now_ms: int) -> str | None:
        covered = {
            shard.slot_id
            for shard in record.publications.values()
            if now_ms < self._deadlines.get((shard.worker_id, shard.life), 0)
        }
        return next((slot for slot in record.spec.expected_slots if slot not in covered), None)

    def _check_leases(self, before: VersionRecord, after: VersionRecord, now_ms: int) -> None:
        longest_ms = self._world.options.max_lease_ttl_ms
        for lease_id, held in before.leases.items():
            now = after.leases.get(lease_id)
            about = f"lease {lease_id} of {held.worker_id} on {after.uid}"
            if now is None:
                early = now_ms < held.deadline_ms
                asked = ("DeleteVersionLease", after.uid, held.worker_id) in self._asked
                self._require(
                    not early or asked, "P7", f"{about} went before its deadline, and was not returned"
                )
            elif now.deadline_ms < held.deadline_ms:
                self._require(False, "P7", f"{about} was shortened")
            elif now.deadline_ms > held.deadline_ms:
                revived = now_ms >= held.deadline_ms
                asked = any((m, after.uid, held.worker_id) in self._asked for m in _ACQUIRING)
                self._require(not revived or asked, "P7", f"{about} had lapsed, and was renewed")
                self._check_grant(before, after, about, now_ms)
        for lease_id in after.leases.keys() - before.leases.keys():
            held = after.leases[lease_id]
            about = f"lease {lease_id} of {held.worker_id} on {after.uid}"
            asked = any((m, after.uid, held.worker_id) in self._asked for m in _ACQUIRING)
            self._require(asked, "P7", f"{about} came, and nobody had asked for it")
            self._check_grant(before, after, about, now_ms)
        if isinstance(after.phase, Releasing):
            limit_ms = after.phase.drain_deadline_ms + longest_ms
            for held in after.leases.values():
                self._require(
                    held.deadline_ms <= limit_ms,
                    "P4",
                    f"lease {held.lease_id} on {after.uid} outlives the drain deadline by more than a TTL",
                )

    def _check_grant(self, before: VersionRecord, after: VersionRecord, about: str, now_ms: int) -> None:
        phase = before.phase
        if isinstance(phase, Releasing):
            late_ms = now_ms - phase.drain_deadline_ms
            self._require(late_ms < 0, "P4", f"{about} was extended {late_ms} ms after the drain deadline")
        elif not isinstance(after.phase, Releasing):
            gap = self._gap(before, now_ms)
            if gap is not None and self._gap(after, now_ms) is not None:
                self._require(False, "P3", f"{about} was granted without a live source of {gap}")

    # What processes are told.

    def _message(self, phase: str, source: str, target: str, method: str) -> None:
        if phase == "fault":
            self.fail("P8", f"{target} could not carry out a command: {method}")

    def asked(self, method: str, request: Any) -> None:
        """A request has reached a server."""
        if method in _ACQUIRING or method == "DeleteVersionLease":
            self._asked.add((method, request.version_id, request.worker_id))

    def _answered(self, source: str, method: str, request: Any, answer: Any) -> None:
        if isinstance(answer, v1.WatchVersionResponse) and answer.HasField("status"):
            self._check_status(source, answer.status)

    def _check_status(self, source: str, status: v1.VersionStatus) -> None:
        if status.state != v1.VERSION_STATE_READY:
            return
        key = (status.version_id, status.created_at_unix_ms, status.revision)
        record = self._records.get(key)
        if record is None:
            return
        gap = self._gap(record, status.now_unix_ms)
        self._require(
            gap is None, "P3", f"{source} was told that {record.uid} is READY without a live source of {gap}"
        )

    # P4: every wait ends.

    @contextlib.contextmanager
    def bounded(self, host: Host, what: str, bound_s: float, *, disturbed: bool = False) -> Iterator[None]:
        """The block ends within `bound_s`, not counting pauses of its process.

        `disturbed`: the bound begins anew whenever it changes what the process can reach.
        """
        world = self._world
        wait = _Wait(host, what, world.loop.time(), bound_s, disturbed)
        process = host.process
        handle = world.loop.in_world(bound_s, self._look, wait, process)
        try:
            yield
        finally:
            wait.over = True
            handle.cancel()

    def _look(self, wait: _Wait, process: Any) -> None:
        if wait.over or not process.alive or process is not wait.who.process:
            return
        loop = self._world.loop
        names = [f"pause of {wait.who.name}"]
        if wait.disturbed:
            names += ["", wait.who.name]
        since_s = max(wait.begun_s, *(self._disturbed_s.get(name, 0.0) for name in names))
        left_s = since_s + wait.bound_s - loop.time()
        if process.paused or left_s > 0.001:
            loop.in_world(max(left_s, 0.1), self._look, wait, process)
            return
        self.fail("P4", f"{wait.who.life} waits for {wait.what} for more than {wait.bound_s:.1f} s")

    def disturb(self, *names: str) -> None:
        """What these can reach changes now; "" concerns everybody."""
        for name in names:
            self._disturbed_s[name] = self._world.loop.time()

    # After each round of callbacks.

    def check(self) -> None:
        """All that is broken by what has just happened."""
        if not self._looked_at and not self.violations:
            self._check_buffers()
        world = self._world
        if world.loop.failures:
            self.fail("driver", world.loop.failures[0])

    def check_backgrounds(self) -> None:
        """That no background task of a client has crashed."""
        for host in self._world.generators:
            self._check_background(host, host.client and host.client._parts.background)
        for trainer in self._world.trainers:
            self._check_background(trainer, trainer.client and trainer.client._background)

    def _check_background(self, host: Host, background: Any) -> None:
        if background is not None and background.failure is not None:
            self.fail("driver", f"{host.life}: a background task crashed", background.failure)

    def _log_version(self, by: str, before: VersionEntry | None, after: VersionEntry | None) -> None:
        known = after or before
        assert known is not None
        was = "-" if before is None else before.record.state.value
        now = "-" if after is None else after.record.state.value
        uid, log = known.record.uid, self._world.log
        if was != now:
            log.add(by, "version %s: %s -> %s", uid, was, now)
        held = {} if before is None else before.record.leases
        holds = {} if after is None else after.record.leases
        for lease_id in sorted(holds.keys() | held.keys()):
            if lease_id not in held:
                log.add(by, "version %s: lease of %s", uid, holds[lease_id].worker_id)
            elif lease_id not in holds:
                log.add(by, "version %s: no lease of %s any more", uid, held[lease_id].worker_id)


_ACQUIRING = ("AcquireVersionLease", "RegisterVersionLease")


def _may_read(host: GeneratorHost, uid: str) -> set[tuple[str, str]]:
    """(worker, manifest) of whatever this generator may read of the version under its own lease now."""
    client = host.client
    assert client is not None
    installation = client._installation
    working, work = installation.record.working, installation.work
    if work is None or not isinstance(working, Leased) or working.version_id != uid:
        return set()
    now_ms = host.clock.now_ms()
    if now_ms >= working.lease_deadline_ms:
        return set()
    workers = {shard.worker_id for shard in work.lease.publications}
    if isinstance(working, Pulling):
        workers &= working.sources
        protected = working.confirmed
        if working.sources_until_ms is not None and now_ms < working.sources_until_ms:
            protected |= working.sources
        workers &= protected
    else:
        if working.still_live is not None:
            workers &= working.still_live
        if isinstance(working, Planned):
            workers &= working.sources
    return {
        (shard.worker_id, shard.manifest_digest)
        for shard in work.lease.publications
        if shard.worker_id in workers
    }
