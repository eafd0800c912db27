"""The registry on every store against a plain model: random commands, time, crashes, lost replies.

The model knows no machine: a publication is live while the life that made it is; a version is READY
while every slot has a live one; a lease is live until its deadline. What the registry answers must be
what the model answers, whatever was processed when, and a repeat must be harmless (P8).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from modelexpress_rl.server import commands, lanes
from modelexpress_rl.server.expiry import Expiry
from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores.port import StoreUnavailable
from modelexpress_rl.server.views import live_publications
from statemachines.ids import lease_id_of
from statemachines.kernel import Reason, Refused
from statemachines.version import VersionState, live_leases
from statemachines.version_records import Publication
from statemachines.worker import WorkerRole
from tests.store.faulty import FaultyStore
from tests.store.harness import KINDS, Harness
from tests.store.records import spec

OK = "OK"
SLOTS = ("s0", "s1")
UIDS = st.sampled_from(["v", "v:shards", ".."])
TRAINERS, GENERATORS = ["t0", "t1", "t2"], ["g0", "g1"]
WORKERS = st.sampled_from([*TRAINERS, *GENERATORS])
SLOT = st.sampled_from([*SLOTS, "unexpected"])
TTL = st.sampled_from([1_000, 5_000, 30_000])
FAULT = st.sampled_from(["none", "none", "none", "before", "after"])
DRAIN_MS, RETENTION_MS = 20_000, 3_600_000


@dataclass
class Worker:
    role: str
    life: int
    deadline: int


@dataclass
class Version:
    published: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    left: set[tuple[str, str, int]] = field(default_factory=set)
    leases: dict[str, int] = field(default_factory=dict)
    drain_until: int | None = None


class Model:
    """What should be true, in the plainest words."""

    def __init__(self) -> None:
        self.now = 0
        self.lives = 0
        self.workers: dict[str, Worker] = {}
        self.versions: dict[str, Version] = {}

    def live(self, worker: str) -> bool:
        return worker in self.workers and self.now < self.workers[worker].deadline

    def shards(self, version: Version) -> set[tuple[str, str]]:
        return {
            (slot, worker)
            for (slot, worker), (life, _) in version.published.items()
            if self.live(worker) and self.workers[worker].life == life
        }

    def readers(self, version: Version) -> dict[str, int]:
        return {worker: until for worker, until in version.leases.items() if self.now < until}

    def state(self, version: Version) -> VersionState:
        if version.drain_until is not None:
            return VersionState.RELEASING
        covered = {slot for slot, _ in self.shards(version)}
        return VersionState.READY if covered == set(SLOTS) else VersionState.STAGING

    # Each command answers OK or the reason of its refusal.

    def register(self, worker: str, role: str, ttl: int) -> Any:
        if not self.live(worker):
            self.lives += 1
            self.workers[worker] = Worker(role, self.lives, self.now + ttl)
            return OK
        if self.workers[worker].role != role:
            return Reason.EXISTS
        self.workers[worker].deadline = max(self.workers[worker].deadline, self.now + ttl)
        return OK

    def leave(self, worker: str) -> Any:
        if self.live(worker):
            self.workers[worker].deadline = self.now
        return OK

    def create(self, uid: str, key: str) -> Any:
        if uid in self.versions:
            return OK if key == f"key of {uid}" else Reason.EXISTS
        self.versions[uid] = Version()
        return OK

    def publish(self, uid: str, worker: str, slot: str, digest: str) -> Any:
        version = self.versions.get(uid)
        if version is None:
            return Reason.NOT_FOUND
        if version.drain_until is not None or not self.live(worker):
            return Reason.PRECONDITION
        if slot not in SLOTS:
            return Reason.INVALID
        life = self.workers[worker].life
        if (slot, worker) in self.shards(version) and version.published[slot, worker] != (life, digest):
            return Reason.EXISTS
        if (slot, worker, life) in version.left:
            return Reason.PRECONDITION
        version.published[slot, worker] = (life, digest)
        return OK

    def lease(self, uid: str, worker: str, ttl: int, *, only_renew: bool = False) -> Any:
        version = self.versions.get(uid)
        if version is None:
            return Reason.NOT_FOUND
        held = self.readers(version).get(worker)
        state = self.state(version)
        if not self.live(worker) or self.workers[worker].role != "GENERATOR" or state is VersionState.STAGING:
            return Reason.PRECONDITION
        if held is None and (only_renew or state is VersionState.RELEASING):
            return Reason.PRECONDITION
        if version.drain_until is not None and self.now >= version.drain_until:
            return Reason.PRECONDITION
        version.leases[worker] = max(held or 0, self.now + ttl)
        return OK

    def give_back(self, uid: str, worker: str) -> Any:
        if uid not in self.versions:
            return Reason.NOT_FOUND
        self.versions[uid].leases.pop(worker, None)
        return OK

    def release(self, uid: str, drain: int) -> Any:
        version = self.versions.get(uid)
        if version is None:
            return Reason.NOT_FOUND
        until = self.now + drain
        version.drain_until = until if version.drain_until is None else min(until, version.drain_until)
        return OK

    def make_ready(self, uid: str) -> Any:
        version = self.versions.get(uid)
        if version is None:
            return Reason.NOT_FOUND
        return OK if self.state(version) is VersionState.READY else Reason.PRECONDITION

    def withdraw(self, uid: str, worker: str, slot: str) -> Any:
        version = self.versions.get(uid)
        if version is None:
            return Reason.NOT_FOUND
        if (slot, worker) not in self.shards(version) and not self.readers(version):
            return Reason.NOT_FOUND
        if version.drain_until is None or self.readers(version):
            return Reason.PRECONDITION
        del version.published[slot, worker]
        return OK

    def retract(self, uid: str, worker: str, slot: str) -> Any:
        version = self.versions.get(uid)
        if version is None:
            return Reason.NOT_FOUND
        version.published.pop((slot, worker), None)
        if self.live(worker):
            version.left.add((slot, worker, self.workers[worker].life))
        return OK


class RegistryMachine(RuleBasedStateMachine):
    kind = "memory"
    redis_address = ""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="mx-rl-test-")
        self.harness = Harness(self.kind, Path(self.folder), self.redis_address)
        self.model = Model()
        self.model.now = self.harness.clock.now_ms()
        self.portal_context = start_blocking_portal("asyncio")
        self.portal = self.portal_context.__enter__()
        self.harness.open()
        self.boot()

    def boot(self) -> None:
        self.faulty = FaultyStore(self.harness.store)
        policy = Settings(drain_deadline_ms=DRAIN_MS, retention_ms=RETENTION_MS)
        self.running = self.portal.wrap_async_context_manager(Registry.running(self.faulty, policy))
        self.registry = self.running.__enter__()
        self.expiry = Expiry(self.registry, self.harness.clock)

    def teardown(self) -> None:
        if not hasattr(self, "portal"):
            return
        self.running.__exit__(None, None, None)
        self.portal.call(self.harness.store.close)
        self.portal_context.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    def ask(self, command: Callable[[], Awaitable[Any]], model: Callable[[], Any], fault: str) -> None:
        """Give a command to both; after a fault it is repeated, as a client would."""
        self.faulty.fail_before, self.faulty.fail_after = int(fault == "before"), int(fault == "after")
        answer = self.answer(command)
        self.faulty.fail_before = self.faulty.fail_after = 0
        if answer == "unavailable":
            assert fault != "none"
            if fault == "after":
                model()  # it was done, and nobody knows
            answer = self.answer(command)
        assert answer == model()

    def answer(self, command: Callable[[], Awaitable[Any]]) -> Any:
        try:
            self.portal.call(command)
        except Refused as refusal:
            return refusal.reason
        except StoreUnavailable:
            return "unavailable"
        return OK

    def tell(self, uid: str, command: Any, model: Callable[[], Any], fault: str) -> None:
        self.ask(lambda: self.registry.command(uid, command), model, fault)

    @rule(worker=WORKERS, odd=st.integers(0, 9), ttl=TTL, fault=FAULT)
    def register(self, worker: str, odd: int, ttl: int, fault: str) -> None:
        role = "TRAINER" if (worker in TRAINERS) is (odd != 0) else "GENERATOR"
        self.ask(
            lambda: self.registry.workers.register(worker, WorkerRole(role), "model", ttl),
            lambda: self.model.register(worker, role, ttl),
            fault,
        )

    @rule(worker=WORKERS, fault=FAULT)
    def leave(self, worker: str, fault: str) -> None:
        self.ask(lambda: self.registry.workers.leave(worker), lambda: self.model.leave(worker), fault)

    @rule(uid=UIDS, own=st.booleans(), fault=FAULT)
    def create(self, uid: str, own: bool, fault: str) -> None:
        if uid not in self.model.versions:
            own = True
        key = f"key of {uid}" if own else "some other key"
        self.ask(
            lambda: self.registry.create(uid, spec(key, slots=SLOTS)),
            lambda: self.model.create(uid, key),
            fault,
        )

    @rule(uid=UIDS, worker=WORKERS, slot=SLOT, digest=st.sampled_from("aab"), fault=FAULT)
    def publish(self, uid: str, worker: str, slot: str, digest: str, fault: str) -> None:
        shard = Publication(slot, worker, 1, 2, digest, "host:1")
        self.tell(uid, commands.publish(shard), lambda: self.model.publish(uid, worker, slot, digest), fault)

    @rule(uid=UIDS, worker=st.sampled_from(TRAINERS), ttl=TTL)
    def publish_all(self, uid: str, worker: str, ttl: int) -> None:
        """The usual way, so that READY is often reached."""
        self.register(worker, 1, ttl, "none")
        self.create(uid, True, "none")
        for slot in SLOTS:
            self.publish(uid, worker, slot, "a", "none")

    @rule(uid=UIDS, worker=WORKERS, ttl=TTL, fault=FAULT)
    def lease(self, uid: str, worker: str, ttl: int, fault: str) -> None:
        self.tell(uid, commands.lease_for(worker, ttl), lambda: self.model.lease(uid, worker, ttl), fault)

    @rule(uid=UIDS, worker=st.sampled_from(GENERATORS), ttl=TTL)
    def register_and_lease(self, uid: str, worker: str, ttl: int) -> None:
        self.register(worker, 1, ttl, "none")
        self.lease(uid, worker, ttl, "none")

    @rule(uid=UIDS, worker=WORKERS, ttl=TTL, fault=FAULT)
    def renew(self, uid: str, worker: str, ttl: int, fault: str) -> None:
        self.tell(
            uid,
            commands.renew(lease_id_of(uid, worker), worker, ttl),
            lambda: self.model.lease(uid, worker, ttl, only_renew=True),
            fault,
        )

    @rule(uid=UIDS, worker=WORKERS, fault=FAULT)
    def give_back(self, uid: str, worker: str, fault: str) -> None:
        self.tell(
            uid,
            commands.give_back(lease_id_of(uid, worker), worker),
            lambda: self.model.give_back(uid, worker),
            fault,
        )

    @rule(uid=UIDS, drain=st.sampled_from([0, 2_000, DRAIN_MS]), fault=FAULT)
    def release(self, uid: str, drain: int, fault: str) -> None:
        self.tell(uid, commands.release(drain, RETENTION_MS), lambda: self.model.release(uid, drain), fault)

    @rule(uid=UIDS)
    def make_ready(self, uid: str) -> None:
        command = commands.set_state(VersionState.READY, DRAIN_MS, RETENTION_MS)
        self.tell(uid, command, lambda: self.model.make_ready(uid), "none")

    @rule(uid=UIDS, worker=WORKERS, slot=SLOT, fault=FAULT)
    def withdraw(self, uid: str, worker: str, slot: str, fault: str) -> None:
        before = dict(self.model.versions[uid].published) if uid in self.model.versions else {}
        if fault == "after" and (slot, worker) in before:
            fault = "none"  # the repeat is told NOT_FOUND, as a client knows; see the wire's tests
        self.tell(
            uid,
            commands.withdraw(slot, worker),
            lambda: self.model.withdraw(uid, worker, slot),
            fault,
        )

    @rule(uid=UIDS, worker=WORKERS, slot=SLOT, fault=FAULT)
    def retract(self, uid: str, worker: str, slot: str, fault: str) -> None:
        self.tell(uid, commands.retract(slot, worker), lambda: self.model.retract(uid, worker, slot), fault)

    @rule(ms=st.sampled_from([1, 999, 1_000, 5_000, 20_000, 30_000]), processed=st.booleans())
    def pass_time(self, ms: int, processed: bool) -> None:
        self.harness.clock.advance(ms)
        self.model.now += ms
        if processed:
            self.portal.call(self.expiry.run_once)

    @rule()
    def pass_for_ever(self) -> None:
        """Past every deadline and every retention: what was released is gone, and so are the dead."""
        for _ in range(3):
            self.pass_time(2 * RETENTION_MS, True)
        self.model.workers.clear()
        for uid in [uid for uid, one in self.model.versions.items() if one.drain_until is not None]:
            del self.model.versions[uid]
        _, remembered = self.portal.call(self.registry.registrations, None)
        assert remembered == []

    @rule()
    def crash(self) -> None:
        self.running.__exit__(None, None, None)
        self.portal.call(self.harness.reopen)
        self.boot()

    @invariant()
    def everything_that_is_read_is_true(self) -> None:
        if not hasattr(self, "portal"):
            return
        for uid in ("v", "v:shards", ".."):
            expected = self.model.versions.get(uid)
            if expected is None:
                assert self.answer(lambda uid=uid: self.registry.view(uid)) is Reason.NOT_FOUND
                continue
            found = self.portal.call(self.registry.view, uid)
            assert commands.WIRE_STATE[found.record.state] is self.model.state(expected)
            shards = {shard.key for shard in live_publications(found.record, found.moment)}
            assert shards == self.model.shards(expected)
            leases = live_leases(found.record, found.moment.now_ms)
            assert {one.worker_id: one.deadline_ms for one in leases} == self.model.readers(expected)
            over = expected.drain_until is not None and not shards and not leases
            assert (found.record.state is VersionState.RETIRED) is over


@pytest.mark.parametrize("kind", KINDS)
def test_the_registry_does_what_the_model_does(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(lanes, "SLOWEST_PACE_S", 1e-9)
    monkeypatch.setattr(lanes, "PACE_S", 1e-9)  # one version is all that there is: don't gather

    class Machine(RegistryMachine):
        pass

    Machine.kind = kind
    Machine.redis_address = Harness.make(kind, tmp_path, request).redis_address
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples={"memory": 60, "redis-cluster": 8}.get(kind, 20),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
