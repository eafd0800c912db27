"""Updates in which anything may fail at any time, on virtual time: one version is served, and all ends."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field

import anyio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from modelexpress_rl.errors import ModelExpressError, StateError, Unavailable, VersionGone
from modelexpress_rl.fleet import Fleet, FleetAborted, FleetPolicy
from statemachines.fleet_records import Held, Part
from tests.fleet.fakes import FakeGenerator
from tests.fleet.virtual import on_virtual_time
from tests.simulation.clocks import SimClock
from tests.simulation.loop import Process, SimLoop

EXAMPLES = int(os.environ.get("MX_TEST_EXAMPLES", "120"))
POLICY = {"stage_timeout_s": 20, "decide_timeout_s": 10, "commit_timeout_s": 8, "undo_timeout_s": 12}
UPDATES = 5
MOST_S = sum(POLICY.values()) + 5.0


@dataclass
class Trouble:
    """How often what goes wrong, by chance that follows from a seed."""

    rng: random.Random
    fails: float = 0.0
    hangs: float = 0.0
    half_way: float = 0.0
    dies: float = 0.0
    calm: bool = field(default=False)

    def upset(self, generator: FakeGenerator) -> None:
        """Make a generator behave as the dice say, call by call."""

        def before(call: str, version: str) -> None:
            if self.calm:
                generator.fails_half_way = 0
                return
            if self.rng.random() < self.dies:
                generator.kill()
                raise Unavailable("the connection broke")
            if self.rng.random() < self.fails:
                kinds = (StateError, Unavailable, ConnectionResetError, VersionGone, ValueError)
                raise self.rng.choice(kinds)(f"{call} {version}")
            if call == "install" and self.rng.random() < self.half_way:
                generator.fails_half_way = 1

        def takes_s(call: str) -> float:
            if not self.calm and self.rng.random() < self.hangs:
                return 1e4
            return self.rng.choice([0.001, 0.02, 0.5, 3.0])

        generator.before, generator.takes_s = before, takes_s
        generator.stubborn = self.hangs == 0 and self.rng.random() < 0.5


troubles = st.builds(
    Trouble,
    st.randoms(use_true_random=False).map(lambda rng: random.Random(rng.getrandbits(64))),
    fails=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
    hangs=st.sampled_from([0.0, 0.0, 0.05, 0.2]),
    half_way=st.sampled_from([0.0, 0.1, 0.5]),
    dies=st.sampled_from([0.0, 0.0, 0.01, 0.05]),
)
quorums = st.sampled_from([None, None, 1, 2, 0.5])


class Watch:
    """Looks at the fleet after everything that happens."""

    def __init__(self, generators: dict[str, FakeGenerator]) -> None:
        self.fleet: Fleet | None = None
        self.generators = generators
        self.looks = 0
        self.together = True
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop.after_event = self.look

    def look(self) -> None:
        self.looks += 1
        assert all(generator.serves != "mixed" for generator in self.generators.values())
        fleet = self.fleet
        if fleet is not None and self.together:
            for name in fleet.members:
                serves = self.generators[name].serves
                assert serves in (None, fleet.current_version_id), (name, serves, fleet.record)

    def rests(self) -> None:
        """Between updates what the fleet says is true, of everyone who lives."""
        assert self.fleet is not None
        for name, one in self.fleet.record.generators.items():
            real = self.generators[name]
            assert one.part in (Part.SERVING, Part.OUT)
            if one.part is Part.SERVING and real.alive:
                assert real.serves == self.fleet.current_version_id
            if one.holds.certain and real.alive and one.part is Part.SERVING:
                assert Held(real.version, real.certain) == one.holds  # type: ignore[arg-type]


def fake_fleet(size: int, trouble: Trouble) -> dict[str, FakeGenerator]:
    generators = {f"g{n}": FakeGenerator("v0") for n in range(size)}
    for generator in generators.values():
        trouble.upset(generator)
    return generators


EXPLORED = settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="MX_TEST_EXAMPLES" not in os.environ,
)


@EXPLORED
@given(size=st.integers(1, 5), quorum=quorums, trouble=troubles, cancels=st.booleans())
def test_one_version_is_served(
    size: int, quorum: int | float | None, trouble: Trouble, cancels: bool
) -> None:
    policy = FleetPolicy(quorum=quorum, grace_s=2, attempts=2, **POLICY)

    async def work(clock: SimClock) -> int:
        generators = fake_fleet(size, trouble)
        watch = Watch(generators)
        trouble.calm = True
        async with Fleet(current_version_id="v0", policy=policy, clock=clock) as fleet:
            for name, generator in generators.items():
                await fleet.admit(name, generator)
            watch.fleet = fleet
            trouble.calm = False
            for step in range(1, UPDATES + 1):
                before, begun_ms = fleet.current_version_id, clock.now_ms()
                patience_s = trouble.rng.uniform(0, 30) if cancels else 1e6
                committed = served = None
                try:
                    with anyio.move_on_after(patience_s):
                        committed = (await fleet.update(f"v{step}")).committed
                except FleetAborted as aborted:
                    served = aborted.report.current_version_id
                except StateError:
                    served = before
                    assert len(fleet.members) < (quorum if isinstance(quorum, int) else 1)
                if committed is not None:
                    assert fleet.current_version_id == f"v{step}"
                elif served is not None:
                    assert fleet.current_version_id == served == before
                assert (clock.now_ms() - begun_ms) / 1000 <= MOST_S
                watch.rests()
                trouble.calm = True
                await fleet.catch_up(timeout_s=30)
                trouble.calm = False
                watch.rests()
            alive = [name for name, generator in generators.items() if generator.alive]
            assert set(alive) <= set(fleet.members), (fleet.out, fleet.record)
        return watch.looks

    looks, _ = on_virtual_time(work)
    assert looks > 10


@EXPLORED
@given(size=st.integers(1, 4), trouble=troubles, killed_after_s=st.floats(0, 12))
def test_an_orchestrator_that_is_killed_leaves_nobody_waiting(
    size: int, trouble: Trouble, killed_after_s: float
) -> None:
    """Its generators serve what they hold, after a while; its successor brings them to one version."""
    policy = FleetPolicy(attempts=2, grace_s=2, **POLICY)
    trouble.dies = 0.0

    async def orchestrate(clock: SimClock, generators: dict[str, FakeGenerator], watch: Watch) -> None:
        trouble.calm = True
        async with Fleet(current_version_id="v0", policy=policy, clock=clock) as fleet:
            for name, generator in generators.items():
                await fleet.admit(name, generator)
            watch.fleet = fleet
            trouble.calm = False
            for step in range(1, UPDATES + 1):
                try:
                    await fleet.update(f"v{step}")
                except ModelExpressError:
                    await clock.sleep(0.1)

    async def work(clock: SimClock) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        generators = fake_fleet(size, trouble)
        watch = Watch(generators)
        process = Process(loop, "orchestrator")
        process.spawn(orchestrate(clock, generators, watch), "orchestrator")
        await asyncio.sleep(10.0 + killed_after_s)
        process.kill()
        for generator in generators.values():
            generator.under_way = 0  # what a dead orchestrator asked is over
        last = "v0" if watch.fleet is None else watch.fleet.current_version_id
        watch.together = False  # nobody is there to keep them together
        await asyncio.sleep(policy.keep_s + policy.hold_s)
        for generator in generators.values():
            assert generator.staged is None
            assert generator.serves is not None or not generator.certain
        trouble.calm = True
        async with Fleet(current_version_id=last, policy=policy, clock=clock) as successor:
            for name, generator in generators.items():
                await successor.admit(name, generator)
            watch.fleet, watch.together = successor, True
            watch.rests()
            assert {generator.serves for generator in generators.values()} == {last}
        watch.fleet = None
        process.bury()
        for _ in range(1000):
            await asyncio.sleep(0.1)
        assert process.ended, process.left

    on_virtual_time(work)
