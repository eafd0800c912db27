"""Generators that break the port's rules: they are out, and the fleet goes on."""

from __future__ import annotations

import asyncio

import pytest

from modelexpress_rl.errors import StateError
from modelexpress_rl.fleet import Fleet, FleetAborted, Holding
from tests.fleet.fakes import FakeGenerator
from tests.fleet.test_updates import MAJORITY, POLICY, Generators, serving, told
from tests.simulation.clocks import SimClock


@pytest.mark.parametrize("said", [None, {"version_id": "v1"}, "v1", Holding(7, held=True)])  # type: ignore[arg-type]
@pytest.mark.parametrize("with_quorum", [True, False])
def test_who_says_nonsense_of_what_it_holds_is_out(said: object, with_quorum: bool) -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        async def holds() -> object:
            return said

        generators["g0"].holds = holds  # type: ignore[method-assign, assignment]
        if with_quorum:
            assert (await fleet.update("v1")).committed
            assert fleet.members == ("g1", "g2")
            assert serving(generators)[1:] == ["v1"] * 2
        else:
            with pytest.raises(FleetAborted):
                await fleet.update("v1")
            assert serving(generators)[1:] == ["v0"] * 2
        assert "g0" not in fleet.members
        del generators["g0"].holds
        await fleet.update("v2", policy=MAJORITY)

    told(story, MAJORITY if with_quorum else POLICY)


@pytest.mark.parametrize("cut", ["stage", "install", "resume", "holds"])
def test_a_call_whose_own_work_was_cancelled_has_failed(cut: str) -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        usual = getattr(generators["g0"], cut)

        async def cancelled(*args: object, **more: object) -> None:
            waited = asyncio.get_running_loop().create_future()
            waited.cancel()
            await waited

        setattr(generators["g0"], cut, cancelled)
        assert (await fleet.update("v1")).committed
        assert serving(generators)[1:] == ["v1"] * 2
        assert fleet.members == ("g1", "g2")
        setattr(generators["g0"], cut, usual)
        assert (await fleet.update("v2")).committed

    told(story, MAJORITY)


@pytest.mark.parametrize("current", [None, "v0"])
def test_who_is_stopped_is_not_admitted(current: str | None) -> None:
    async def story(fleet: Fleet, generators: Generators, clock: SimClock) -> None:
        stopped = FakeGenerator("v0")
        stopped.held = True

        async def resume(version_id: str) -> None:
            pass  # it says that it does, and doesn't

        stopped.resume = resume  # type: ignore[method-assign]
        with pytest.raises(StateError, match="generator late is stopped, and holds v0"):
            await fleet.admit("late", stopped)
        assert "late" not in fleet.members

    told(story, current=current)
