"""Generator clients of this process as a fleet's: real clients, memory that moves, one control plane."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest

from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import StateError, VersionGone
from modelexpress_rl.fleet import Fleet, FleetAborted, FleetPolicy, Holding, InProcessGenerator
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from statemachines.fleet_records import Held as FleetHeld
from tests.fleet.fakes import FakeGenerator
from tests.inference.publisher import Publisher, create_version, whole
from tests.inference.world import Model, World, as_bytes, true_soon, weights

pytestmark = pytest.mark.anyio

POLICY = FleetPolicy(stage_timeout_s=20, commit_timeout_s=10, undo_timeout_s=10, attempts=1)


class Engine:
    """A context whose writing fails when it is told to: half-way, after the first tensor."""

    def __init__(self, model: Model) -> None:
        self._context = TorchGeneratorContext(model)
        self.fails = False

    def create_adapter(self) -> Any:
        adapter = self._context.create_adapter()
        loader = adapter.loader

        def failing(published: Any) -> Any:
            made = loader(published)
            install = made.install

            def write(staged: Any) -> Any:
                answer = install(staged)
                if self.fails:
                    raise RuntimeError("the engine fell over")
                return answer

            made.install = write
            return made

        adapter.loader = failing
        return adapter


class Stubborn:
    """An engine that resumes at the second attempt."""

    def __init__(self) -> None:
        self.attempts = 0

    async def resume(self) -> None:
        self.attempts += 1
        if self.attempts == 1:
            raise RuntimeError("the engine is busy")


class Rank:
    """One generator: its model, its engine, and whether it is paused."""

    def __init__(
        self, model: Model, engine: Engine, generator: InProcessGenerator, events: list[str]
    ) -> None:
        self.model = model
        self.engine = engine
        self.generator = generator
        self.events = events


@pytest.fixture
async def publisher(world: World) -> Publisher:
    return await world.trainer()


@pytest.fixture
async def ranks(world: World) -> AsyncIterator[list[Rank]]:
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for n in range(3):
            model = Model()
            engine, events = Engine(model), list[str]()
            client = await world.generator(model, worker_id=f"g{n}", context=engine)
            generator = InProcessGenerator(
                client, pause=noting(events, "pause"), resume=noting(events, "resume")
            )
            made.append(Rank(model, engine, await stack.enter_async_context(generator), events))
        yield made


def noting(events: list[str], event: str) -> Callable[[], Awaitable[None]]:
    async def note() -> None:
        events.append(event)

    return note


async def publish(world: World, publisher: Publisher, step: int) -> None:
    await create_version(world.control, f"v{step}", ["s0"])
    await publisher.publish(f"v{step}", "s0", whole(weights(step)))


async def test_a_hold_that_ends_just_now_is_over_before_the_next_install_stops_the_engine(
    world: World, publisher: Publisher, ranks: list[Rank]
) -> None:
    generator, events = ranks[0].generator, ranks[0].events
    resuming, may_resume = anyio.Event(), anyio.Event()

    async def resume() -> None:
        resuming.set()
        await may_resume.wait()
        events.append("resume")

    generator._resume = resume
    for step in (1, 2):
        await publish(world, publisher, step)
    await generator.stage("v1", keep_s=100)
    await generator.install("v1", hold_s=0.01)
    with anyio.fail_after(10):
        await resuming.wait()
        await generator.stage("v2", keep_s=100)
        async with anyio.create_task_group() as group:

            async def install() -> None:
                await generator.install("v2", hold_s=100)

            group.start_soon(install)
            await anyio.wait_all_tasks_blocked()
            may_resume.set()
    assert events == ["pause", "resume", "pause"]
    assert await generator.holds() == Holding("v2", held=True)


async def test_a_fleet_of_clients(world: World, publisher: Publisher, ranks: list[Rank]) -> None:
    await publish(world, publisher, 1)
    async with Fleet(current_version_id="v1", policy=POLICY) as fleet:
        for n, rank in enumerate(ranks):
            await fleet.admit(f"g{n}", rank.generator)
        assert all(rank.model.bytes() == as_bytes(weights(1)) for rank in ranks)
        await publish(world, publisher, 2)
        async with fleet.updating("v2") as update:
            await update.staged()
            assert all(rank.model.bytes() == as_bytes(weights(1)) for rank in ranks)
            assert await ranks[0].generator.holds() == Holding("v1", staged="v2")
            await update.commit()
        assert all(rank.model.bytes() == as_bytes(weights(2)) for rank in ranks)
        assert all(rank.events == ["pause", "resume"] * 2 for rank in ranks)

        await publish(world, publisher, 3)
        ranks[1].engine.fails = True
        with pytest.raises(FleetAborted, match="the engine fell over") as caught:
            await fleet.update("v3")  # going back fails there, too
        assert caught.value.report.members == ("g0", "g2")
        assert not caught.value.report.holds["g1"].certain
        assert all(ranks[n].model.bytes() == as_bytes(weights(2)) for n in (0, 2))
        assert ranks[1].generator.held  # it holds a mixture, and does not serve
        ranks[1].engine.fails = False
        assert await fleet.catch_up() == {}
        assert ranks[1].model.bytes() == as_bytes(weights(2))
        assert (await fleet.update("v3")).committed
        assert all(rank.model.bytes() == as_bytes(weights(3)) for rank in ranks)


async def test_going_back_needs_the_old_version(
    world: World, publisher: Publisher, ranks: list[Rank]
) -> None:
    await publish(world, publisher, 1)
    async with Fleet(current_version_id="v1", policy=POLICY) as fleet:
        await fleet.admit("g0", ranks[0].generator)
        await fleet.admit("broken", broken := FakeGenerator("v1"))
        await publish(world, publisher, 2)
        broken.takes_s = lambda call: 0.5 if call == "install" else 0.01
        broken.fails_half_way = 1
        async with fleet.updating("v2") as update:
            await update.staged()
            await world.control.delete_weight_version(refit.DeleteWeightVersionRequest(uid="v1"))
            with pytest.raises(FleetAborted) as caught:
                await update.commit()
        assert caught.value.report.holds["g0"] == FleetHeld("v2")
        assert "VersionGone" in caught.value.report.out["g0"]
        assert ranks[0].model.bytes() == as_bytes(weights(2))


async def test_a_version_that_ends_while_it_is_staged(
    world: World, publisher: Publisher, ranks: list[Rank]
) -> None:
    await publish(world, publisher, 1)
    async with Fleet(current_version_id="v1", policy=FleetPolicy(quorum=1, attempts=1)) as fleet:
        for n, rank in enumerate(ranks):
            await fleet.admit(f"g{n}", rank.generator)
        await create_version(world.control, "v2", ["s0"])  # it is waited for, and never READY
        async with fleet.updating("v2") as update, anyio.create_task_group() as group:
            group.start_soon(world.control.delete_weight_version, refit.DeleteWeightVersionRequest(uid="v2"))
            with pytest.raises(FleetAborted, match="VersionGone"):
                await update.staged()
        assert len(fleet.members) == 3
        await publish(world, publisher, 3)
        async with fleet.updating("v3") as update:
            await update.staged()
            await world.control.delete_weight_version(refit.DeleteWeightVersionRequest(uid="v3"))
            assert (await update.commit()).committed  # whoever has staged it needs nobody any more
        assert all(rank.model.bytes() == as_bytes(weights(3)) for rank in ranks)


async def test_what_was_staged_is_not_kept_for_ever(
    world: World, publisher: Publisher, ranks: list[Rank]
) -> None:
    await publish(world, publisher, 1)
    generator = ranks[0].generator
    await generator.stage("v1", keep_s=0.05)

    await true_soon(lambda: generator._handle() is None)
    with pytest.raises(StateError, match="version v1 is not staged"):
        await generator.install("v1", hold_s=1)
    await generator.stage("v1", keep_s=60)
    await publish(world, publisher, 2)
    await generator.stage("v2", keep_s=60)  # v1 is given up for it
    assert (await generator.holds()).staged == "v2"
    await generator.abort("v2", back_to=None)
    await generator.abort("v2", back_to=None)
    assert await generator.holds() == Holding(None)
    assert ranks[0].events == []


async def test_an_engine_that_does_not_resume_is_asked_again(world: World, publisher: Publisher) -> None:
    await publish(world, publisher, 1)
    engine = Stubborn()
    client = await world.generator(Model())
    async with InProcessGenerator(client, resume=engine.resume) as generator:
        await generator.stage("v1", keep_s=60)
        await generator.install("v1", hold_s=0.05)
        await true_soon(lambda: not generator.held)
    assert engine.attempts == 2


async def test_a_hold_ends_by_itself(
    world: World, publisher: Publisher, ranks: list[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    await publish(world, publisher, 1)
    rank, generator = ranks[0], ranks[0].generator
    await generator.stage("v1", keep_s=60)
    await generator.install("v1", hold_s=0.05)
    await true_soon(lambda: not generator.held)
    assert rank.events == ["pause", "resume"]
    await generator.install("v1", hold_s=60)  # a repeat only stops serving
    assert await generator.holds() == Holding("v1", held=True)
    await generator.resume("v1")
    await generator.resume("v1")
    assert rank.events == ["pause", "resume"] * 2
    with pytest.raises(StateError, match="version v9 can't be served: held is v1"):
        await generator.resume("v9")
    with pytest.raises(StateError, match="there is no version to go back to"):
        await generator.abort("v1", back_to=None)
    with pytest.raises(VersionGone):
        await generator.abort("v1", back_to="v0")
    rank.engine.fails = True
    await publish(world, publisher, 2)
    await generator.stage("v2", keep_s=60)
    with pytest.raises(StateError, match="fell over"):
        await generator.install("v2", hold_s=0.01)
    await true_soon(lambda: "no verdict came, and nothing can be served" in caplog.text)
    assert generator.held  # a mixture is never served, however long nobody asks
