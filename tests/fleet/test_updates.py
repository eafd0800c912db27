"""Updates of fleets, one by one: who serves what before, during and after, and how long it may take."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable

import anyio
import pytest

from modelexpress_rl.errors import DeadlineExceeded, StateError, Unavailable, UsageError, VersionGone
from modelexpress_rl.fleet import Fleet, FleetAborted, FleetGenerator, FleetPolicy
from statemachines.fleet_records import Held
from tests.fleet.fakes import FakeGenerator
from tests.fleet.virtual import on_virtual_time
from tests.simulation.clocks import SimClock

POLICY = FleetPolicy(
    stage_timeout_s=100, decide_timeout_s=50, commit_timeout_s=20, undo_timeout_s=30, grace_s=5, attempts=2
)
MAJORITY = FleetPolicy(
    quorum=2, stage_timeout_s=100, decide_timeout_s=50, commit_timeout_s=20, undo_timeout_s=30, grace_s=5
)
NEVER_S = 1e6
Generators = dict[str, FakeGenerator]
Story = Callable[[Fleet, Generators, SimClock], Awaitable[None]]


def told(story: Story, policy: FleetPolicy = POLICY, size: int = 3, current: str | None = "v0") -> float:
    """Tell a story of a fleet that serves `current`; how many virtual seconds it took."""

    async def tell(clock: SimClock) -> None:
        async with Fleet(current_version_id=current, policy=policy, clock=clock) as fleet:
            generators = {f"g{n}": FakeGenerator(current) for n in range(size)}
            for name, generator in generators.items():
                await fleet.admit(name, generator)
                generator.calls.clear()
            await story(fleet, generators, clock)

    return on_virtual_time(tell)[1]


def serving(generators: Generators) -> list[str | None]:
    return [generator.serves for generator in generators.values()]


def hangs(*calls: str) -> Callable[[str], float]:
    return lambda call: NEVER_S if call in calls else 0.01


def fails(call: str, error: Exception) -> Callable[[str, str], None]:
    def before(called: str, version: str) -> None:
        if called == call:
            raise error

    return before


def test_what_is_served_is_no_abort_after_one() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        generators["g0"].before = fails("stage", StateError("no"))
        with pytest.raises(FleetAborted):
            await fleet.update("v1")
        assert (await fleet.update("v0")).committed

    told(story)


def test_all_go_together() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        report = await fleet.update("v1")
        assert report.committed
        assert serving(generators) == ["v1"] * 3
        assert (fleet.current_version_id, fleet.members) == ("v1", ("g0", "g1", "g2"))
        assert report.holds == dict.fromkeys(fleet.members, Held("v1"))
        assert generators["g0"].calls == ["stage v1", "install v1", "holds", "resume v1"]
        assert set(report.metrics) == {"stage_s", "decide_s", "commit_s", "settle_s", "update_s"}
        popped = fleet.pop_metrics()
        assert (popped["committed"], popped["members"], popped["out"]) == (1, 3, 0)
        assert fleet.pop_metrics() == {}

    told(story)


def test_nobody_serves_the_new_version_before_everybody_has_it() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        generators["g2"].takes_s = lambda call: 7.0 if call == "install" else 0.01
        seen: set[tuple[str | None, ...]] = set()

        async def look() -> None:
            while True:
                seen.add(tuple(serving(generators)))
                await clock.sleep(0.005)

        async with anyio.create_task_group() as group:
            group.start_soon(look)
            await fleet.update("v1")
            await clock.sleep(1)
            group.cancel_scope.cancel()
        served = [{version for version in each if version is not None} for each in seen]
        assert all(len(versions) <= 1 for versions in served), seen
        assert {"v0"} in served
        assert {"v1"} in served

    told(story)


def test_one_that_fails_to_stage_keeps_all_on_the_old_version() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        generators["g1"].before = fails("stage", StateError("no memory"))
        with pytest.raises(FleetAborted, match=r"generator g1: StateError: no memory") as caught:
            await fleet.update("v1")
        assert serving(generators) == ["v0"] * 3
        assert [generator.staged for generator in generators.values()] == [None] * 3
        assert caught.value.report.members == ("g0", "g1", "g2")
        assert caught.value.report.holds == dict.fromkeys(fleet.members, Held("v0"))
        assert all("install v1" not in generator.calls for generator in generators.values())
        generators["g1"].before = lambda call, version: None
        assert (await fleet.update("v1")).committed  # the same version may be tried again

    told(story)


def test_one_that_fails_half_way_brings_the_others_back() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        generators["g1"].fails_half_way = 1
        generators["g1"].takes_s = lambda call: 1.0 if call == "install" else 0.01
        with pytest.raises(FleetAborted, match="half of it"):
            await fleet.update("v1")
        assert serving(generators) == ["v0"] * 3
        assert "abort v1" in generators["g0"].calls

    told(story)


def test_one_that_can_not_go_back_is_out_and_says_what_it_holds() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        generators["g0"].gone.add("v0")
        generators["g1"].before = fails("install", StateError("the engine is busy"))
        generators["g1"].takes_s = lambda call: 1.0 if call == "install" else 0.01
        generators["g1"].fails_half_way = 0
        generators["g2"].fails_half_way = 1
        generators["g2"].takes_s = lambda call: 2.0 if call == "install" else 0.01
        with pytest.raises(FleetAborted) as caught:
            await fleet.update("v1")
        report = caught.value.report
        assert report.members == ("g1", "g2")
        assert report.holds["g0"] == Held("v1")
        assert "no version to go back to" in report.out["g0"]
        assert "out: g0 holds v1" in str(report)
        assert serving(generators) == [None, "v0", "v0"]  # it holds v1, and waits
        await clock.sleep(POLICY.hold_s)
        assert serving(generators) == ["v1", "v0", "v0"]  # it is not in the fleet

    told(story)


def test_one_that_does_not_answer_costs_a_phase_and_not_more() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        generators["g1"].takes_s = hangs("install", "abort", "holds")
        with pytest.raises(FleetAborted, match="g1 was not done in time") as caught:
            await fleet.update("v1")
        report = caught.value.report
        assert report.members == ("g0", "g2")
        assert report.holds["g1"] == Held("v0", certain=False)
        assert "nobody knows what (last known: v0)" in str(report)
        assert serving(generators)[0] == serving(generators)[2] == "v0"

    assert told(story) < POLICY.commit_timeout_s + POLICY.undo_timeout_s + 10


def test_a_quorum_goes_on_without_the_others() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        generators["g0"].takes_s = hangs("stage")
        report = await fleet.update("v1")
        assert report.committed
        assert report.members == ("g1", "g2")
        assert report.out == {"g0": "version v1: was not done in time"}
        assert report.holds["g0"] == Held("v0")
        generators["g0"].takes_s = lambda call: 0.01
        assert await fleet.catch_up() == {}
        assert serving(generators) == ["v1"] * 3
        assert set(fleet.members) == {"g0", "g1", "g2"}

    assert told(story, MAJORITY) < 10  # the grace, not the whole phase


def test_a_quorum_installs_without_one_that_dies_between_stage_and_commit() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        async with fleet.updating("v1") as update:
            await update.staged()
            generators["g2"].kill()
            report = await update.commit()
        assert report.members == ("g0", "g1")
        assert "nobody answers" in report.out["g2"]
        assert serving(generators) == ["v1", "v1", None]
        generators["g2"].alive, generators["g2"].version = True, None  # started again, from scratch
        generators["g2"].held = False
        await fleet.admit("g2")
        assert serving(generators) == ["v1"] * 3

    told(story, MAJORITY)


def test_without_a_quorum_the_death_of_one_keeps_all_back() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        async with fleet.updating("v1") as update:
            await update.staged()
            generators["g2"].kill()
            with pytest.raises(FleetAborted) as caught:
                await update.commit()
        assert caught.value.report.members == ("g0", "g1")
        assert caught.value.report.holds["g2"] == Held("v0", certain=False)
        assert serving(generators) == ["v0", "v0", None]
        assert (await fleet.update("v1")).committed  # all who are left
        assert serving(generators) == ["v1", "v1", None]

    told(story)


def test_a_version_that_is_released_meanwhile_is_given_up_whatever_the_quorum() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        generators["g0"].before = fails("stage", VersionGone("v1 was evicted"))
        generators["g0"].takes_s = lambda call: 5.0 if call == "stage" else 0.01
        with pytest.raises(FleetAborted, match="evicted"):
            await fleet.update("v1")
        assert serving(generators) == ["v0"] * 3
        assert len(fleet.members) == 3

    told(story, MAJORITY)


def test_the_version_that_is_served_is_no_update() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        report = await fleet.update("v0")
        assert report.committed
        assert report.metrics["update_s"] == 0
        assert all(generator.calls == [] for generator in generators.values())
        await fleet.update("v1")
        assert (await fleet.update("v1")).committed

    told(story)


def test_a_lost_answer_is_asked_for_again() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        lost = {"stage", "install", "resume"}

        def before(call: str, version: str) -> None:
            if call in lost:
                lost.discard(call)
                raise Unavailable("the connection broke")

        generators["g1"].before = before
        assert (await fleet.update("v1")).committed
        assert not lost
        assert serving(generators) == ["v1"] * 3

    told(story)


def test_an_install_whose_answer_is_lost_counts_by_what_is_held() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        one = generators["g1"]
        install = one.install

        async def installs_and_fails(version_id: str, *, hold_s: float) -> None:
            await install(version_id, hold_s=hold_s)
            raise ConnectionResetError("gone")

        one.install = installs_and_fails  # type: ignore[method-assign]
        assert (await fleet.update("v1")).committed
        one.install = lambda version_id, *, hold_s: asyncio.sleep(0)  # type: ignore[method-assign]
        with pytest.raises(FleetAborted, match="says that it has installed it, and holds v1"):
            await fleet.update("v2")  # what says that it did, and didn't, is not believed
        assert serving(generators) == ["v1"] * 3

    told(story)


def test_a_call_that_can_not_be_cancelled_is_waited_for() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        slow = generators["g1"]
        slow.stubborn = True
        slow.takes_s = lambda call: POLICY.commit_timeout_s + 3 if call == "install" else 0.01
        with pytest.raises(FleetAborted, match="g1 was not done in time"):
            await fleet.update("v1")
        assert slow.calls == ["stage v1", "install v1", "holds", "abort v1", "holds"]
        assert serving(generators) == ["v0"] * 3
        assert len(fleet.members) == 3

    told(story)


def test_nobody_goes_on_asking_who_is_out() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        generators["g0"].takes_s = hangs("stage", "abort")
        assert (await fleet.update("v1")).members == ("g1", "g2")
        await clock.sleep(0.1)
        assert generators["g0"].under_way == 0

    told(story, MAJORITY)


def test_whoever_leaves_an_update_aborts_it() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        async with fleet.updating("v1") as update:
            await update.staged()
            with pytest.raises(StateError, match="the update to v1 is under way"):
                await fleet.update("v2")
        assert [generator.staged for generator in generators.values()] == [None] * 3
        with pytest.raises(RuntimeError, match="mine"):
            async with fleet.updating("v1") as update:
                raise RuntimeError("mine")
        assert "the orchestrator left the update: RuntimeError: mine" in update.report.why
        with pytest.raises(StateError, match="Commit is not possible then"):
            await update.commit()

    told(story)


@pytest.mark.parametrize("after_s", [0.005, 0.015, 0.025, 0.035, 5.0])
def test_a_cancelled_update_leaves_all_on_one_version(after_s: float) -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        with anyio.move_on_after(after_s) as scope:
            await fleet.update("v1")
        assert len(set(serving(generators))) == 1
        assert serving(generators)[0] == fleet.current_version_id
        assert (fleet.current_version_id == "v1") or scope.cancelled_caught
        assert len(fleet.members) == 3
        assert (await fleet.update("v2")).committed

    told(story)


def test_an_orchestrator_that_never_commits_is_not_waited_for() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        async with fleet.updating("v1") as update:
            await update.staged()
            await clock.sleep(POLICY.decide_timeout_s + 1)
            with pytest.raises(FleetAborted, match="did not commit in time"):
                await update.staged()

    told(story)


def test_a_newcomer_is_admitted_only_with_the_current_version() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        fresh = FakeGenerator(None)
        await fleet.admit("g3", fresh)
        assert fresh.calls == ["holds", "stage v0", "install v0", "resume v0", "holds"]
        assert (fresh.serves, fleet.members[-1]) == ("v0", "g3")
        paused = FakeGenerator("v0")
        paused.held = True  # its orchestrator died
        await fleet.admit("g4", paused)
        assert paused.serves == "v0"
        liar = FakeGenerator("v9")
        liar.stage = liar.install = liar.resume = lambda *_, **__: asyncio.sleep(0)  # type: ignore[assignment,misc]
        with pytest.raises(StateError, match="g5 holds v9, and the fleet serves v0"):
            await fleet.admit("g5", liar)
        assert "g5" not in fleet.members

    told(story)


def test_a_newcomer_waits_for_an_update_and_catches_up_with_it() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        slow = FakeGenerator(None)
        slow.takes_s = lambda call: 3.0 if call == "stage" else 0.01
        async with anyio.create_task_group() as group:
            group.start_soon(fleet.admit, "slow", slow)
            await clock.sleep(1)  # it is being brought to v0
            assert (await fleet.update("v1")).committed
            assert "slow" not in fleet.members
        assert "stage v0" in slow.calls
        assert slow.serves == "v1"
        assert "slow" in fleet.members
        async with fleet.updating("v2") as update, anyio.create_task_group() as group:
            group.start_soon(fleet.admit, "late", FakeGenerator("v1"))
            await update.staged()
            await clock.sleep(1)
            assert "late" not in fleet.members
            await update.commit()
        assert "late" in fleet.members

    told(story)


def test_an_admission_has_a_deadline() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        hung = FakeGenerator(None)
        hung.takes_s = hangs("stage")
        with pytest.raises(DeadlineExceeded, match="g9 was not admitted within 3 s; the fleet serves v0"):
            await fleet.admit("g9", hung, timeout_s=3)
        async with anyio.create_task_group() as group:
            group.start_soon(fleet.admit, "g8", FakeGenerator(None))
            await anyio.lowlevel.checkpoint()
            with pytest.raises(StateError, match="g8 is being admitted already"):
                await fleet.admit("g8", FakeGenerator(None))

    told(story)


def test_who_is_known_to_be_dead_is_expelled_and_may_come_back() -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        fleet.expel("g1", "its host is gone")
        assert fleet.out == {"g1": "its host is gone"}
        await fleet.update("v1")
        assert serving(generators) == ["v1", "v0", "v1"]
        generators["g1"].before = fails("stage", StateError("no memory"))
        assert await fleet.catch_up(timeout_s=5) == {"g1": "its host is gone"}
        replacement = FakeGenerator(None)
        await fleet.admit("g1", replacement)
        assert replacement.serves == "v1"
        with pytest.raises(StateError, match="another one of that name is in the fleet"):
            await fleet.admit("g1", FakeGenerator("v1"))
        await fleet.admit("g1")  # it is a member
        fleet.forget("g0")
        assert "g0" not in fleet.holds
        with pytest.raises(StateError, match="g0 is not known"):
            fleet.expel("g0", "again")
        async with fleet.updating("v2") as update:
            with pytest.raises(StateError, match="not possible then"):
                fleet.expel("g1", "now")
            await update.staged()

    told(story)


def test_routers_hear_of_a_new_version_before_anyone_serves_it() -> None:
    async def tell(clock: SimClock) -> None:
        heard: list[tuple[str | None, tuple[str, ...], list[str | None]]] = []

        def hear(fleet: Fleet) -> None:
            heard.append((fleet.current_version_id, fleet.members, serving(generators)))
            raise RuntimeError("routers may fail")

        generators = {f"g{n}": FakeGenerator("v0") for n in range(2)}
        policy = FleetPolicy(quorum=1, stage_timeout_s=10, grace_s=1)
        async with Fleet(current_version_id="v0", policy=policy, clock=clock, on_change=hear) as fleet:
            for name, generator in generators.items():
                await fleet.admit(name, generator)
            generators["g1"].before = fails("stage", StateError("no memory"))
            await fleet.update("v1")
        assert heard[-1] == ("v1", ("g0",), [None, "v0"])

    on_virtual_time(tell)


def test_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        generators["g2"].kill()
        with pytest.raises(FleetAborted):
            await fleet.update("v1")

    with caplog.at_level(logging.INFO, "modelexpress_rl.fleet"):
        told(story)
    [line] = [text for text in caplog.messages if text.startswith("MX_FLEET_UPDATE ")]
    said = json.loads(line.removeprefix("MX_FLEET_UPDATE "))
    assert (said["version_id"], said["committed"], said["members"]) == ("v1", 0, 2)
    assert said["out"] == {"g2": "v0"}  # it was never told to install
    assert any(text.startswith("generator g2 is out of the fleet: ") for text in caplog.messages)


def test_what_can_not_be_is_refused() -> None:
    for wrong in ({"quorum": 0}, {"quorum": 1.5}, {"grace_s": -1}, {"attempts": 0}, {"commit_timeout_s": 0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            FleetPolicy(**wrong)  # type: ignore[arg-type]
    assert FleetPolicy(quorum=0.9).terms(10).quorum == 9
    assert FleetPolicy(quorum=0.5).terms(3).quorum == 2
    assert isinstance(FakeGenerator(), FleetGenerator)

    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        with pytest.raises(UsageError, match="is not known: say what it is"):
            await fleet.admit("nobody")
        with pytest.raises(UsageError, match="expected a FleetGenerator"):
            await fleet.admit("nothing", object())  # type: ignore[arg-type]
        with pytest.raises(
            StateError, match="needs a quorum of 9 generators, at least 1, and the fleet has 3"
        ):
            await fleet.update("v1", policy=FleetPolicy(quorum=9))
        assert (await fleet.update("v1")).committed  # a refusal leaves nothing behind

    told(story)
    with pytest.raises(StateError, match="the fleet is not open"):
        Fleet().expel("g", "x")


def test_an_orchestrator_loads_neither_torch_nor_a_transport() -> None:
    program = (
        "import sys, modelexpress_rl.fleet\n"
        "heavy = {'torch', 'nixl', 'numpy', 'grpc', 'grpclib', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
