"""Generations as the copy modes use them: who gets which, what is refused, and that nothing is torn."""

from __future__ import annotations

import contextlib

import anyio
import pytest

from modelexpress_rl.errors import DeadlineExceeded, StateError
from modelexpress_rl.train.arena import HOST
from modelexpress_rl.train.generations import GenerationPool, NoRoom, Use
from modelexpress_rl.transport.inprocess import Hub, InprocessAgent
from statemachines.back_pressure import IDLE_USES, BackPressure, Limits
from statemachines.generation_records import GenerationState

pytestmark = pytest.mark.anyio


def pool_of(policy: str = "WAIT", generations: int = 2, most: int = 4) -> GenerationPool:
    return GenerationPool(Hub().agent("a"), Limits(generations, most, BackPressure(policy)))


async def captured(pool: GenerationPool, version_id: str, size_bytes: int = 10) -> Use:
    """A use whose copy is whole, and which is served."""
    use = await pool.reserve(version_id, 1)
    await use.fit({HOST: size_bytes})
    with use.writing() as writing:
        writing.part(HOST, 0, size_bytes)[:] = 1
    use.serve()
    return use


def states(pool: GenerationPool) -> list[str]:
    return [one.record.state.value for one in pool.generations]


class TestWhoGetsWhich:
    async def test_memory_is_made_and_registered_once_and_made_anew_where_it_is_too_small(self) -> None:
        pool = pool_of()
        one = await captured(pool, "v1", 5000)
        registration, addr = pool.generations[0].registration, one.addr(HOST)
        one.release()
        again = await captured(pool, "v2", 100)
        assert (again.number, again.addr(HOST)) == (one.number, addr)
        assert pool.generations[0].registration is registration
        assert addr % 4096 == 0
        again.release()
        bigger = await captured(pool, "v3", 1 << 20)
        assert (bigger.number, bigger.fitted) == (one.number, 2)
        assert len(pool.generations) == 1
        await pool.aclose()

    async def test_a_third_waits_for_one_to_be_free_and_is_told_who_holds_them(self) -> None:
        pool = pool_of()
        await captured(pool, "v1")
        two = await captured(pool, "v2")
        assert pool.room == 0
        got: list[str] = []

        async def wait(version_id: str) -> None:
            use = await captured(pool, version_id)
            got.append(version_id)
            assert use.number == two.number
            use.release()

        async with anyio.create_task_group() as group:
            for version_id in ("v3", "v4", "v5"):
                group.start_soon(wait, version_id)
                await anyio.wait_all_tasks_blocked()
            assert got == []
            two.wanted_back()
            with pytest.raises(
                DeadlineExceeded, match=r"v6: no free .* held by version v1 \(SERVING\), version v2 \(DRAIN"
            ):
                await pool.reserve("v6", 0.01)
            two.release()
        assert got == ["v3", "v4", "v5"]
        await pool.aclose()

    async def test_a_waiter_that_gives_up_leaves_the_next_one_its_turn(self) -> None:
        pool = pool_of(generations=1)
        one = await captured(pool, "v1")
        scope = anyio.CancelScope()
        got: list[Use] = []

        async def impatient() -> None:
            with scope:
                await pool.reserve("v2", 5)

        async def patient() -> None:
            got.append(await pool.reserve("v3", 5))

        async with anyio.create_task_group() as group:
            group.start_soon(impatient)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(patient)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            await anyio.wait_all_tasks_blocked()
            one.release()
        assert len(got) == 1
        await pool.aclose()

    async def test_skip_says_so_at_once(self) -> None:
        pool = pool_of("SKIP")
        one = await captured(pool, "v1")
        await captured(pool, "v2")
        with anyio.fail_after(1), pytest.raises(NoRoom, match="version v3: skipped: 2 of 2 are held by"):
            await pool.reserve("v3", 60)
        one.release()
        await captured(pool, "v4")
        assert pool.figures()["versions_skipped"] == 1
        await pool.aclose()

    async def test_grow_makes_more_up_to_the_limit_and_then_waits_and_lets_them_go_again(self) -> None:
        pool = pool_of("GROW", generations=1, most=3)
        uses = [await captured(pool, f"v{n}") for n in range(3)]
        assert [use.number for use in uses] == [1, 2, 3]
        assert pool.figures()["generations_grown"] == 2
        with pytest.raises(DeadlineExceeded, match="3 of 3 are held"):
            await pool.reserve("v3", 0.01)
        for use in uses:
            use.release()
        for number in range(2 * IDLE_USES):
            (await captured(pool, f"w{number}")).release()
        assert [one.record.number for one in pool.generations] == [1]
        await pool.aclose()


class TestWhatIsRefused:
    async def test_what_is_read_is_not_written(self) -> None:
        pool = pool_of()
        use = await captured(pool, "v1")
        for state in (GenerationState.SERVING, GenerationState.DRAINING, GenerationState.FREE):
            assert states(pool) == [state]
            with pytest.raises(StateError, match="BeginCopy is not possible then"), use.writing():
                pytest.fail("it was written")
            with pytest.raises(StateError, match="its memory stays as it is"):
                await use.fit({HOST: 1 << 20})
            use.wanted_back() if state is GenerationState.SERVING else use.release()
        assert not use.memory.flags.writeable
        await pool.aclose()

    async def test_a_part_is_handed_out_only_while_the_copy_runs(self) -> None:
        pool = pool_of()
        use = await pool.reserve("v1", 1)
        await use.fit({HOST: 100})
        with use.writing() as writing:
            writing.part(HOST, 0, 100)[:] = 7
            with pytest.raises(StateError, match="is being written"), use.writing():
                pytest.fail("it was written twice")
        with pytest.raises(StateError, match="the copy of this use has ended"):
            writing.part(HOST, 0, 100)
        await pool.aclose()

    async def test_a_use_that_is_over_reaches_nothing(self) -> None:
        pool = pool_of(generations=1)
        old = await captured(pool, "v1")
        old.release()
        new = await captured(pool, "v2")
        assert new.number == old.number
        old.release()
        old.wanted_back()
        assert states(pool) == ["SERVING"]
        assert not old.wanted
        await pool.aclose()

    async def test_half_a_copy_is_not_served_and_the_next_attempt_is_fine(self) -> None:
        pool = pool_of(generations=1)
        use = await pool.reserve("v1", 1)
        await use.fit({HOST: 100})
        with contextlib.suppress(ZeroDivisionError), use.writing() as writing:
            writing.part(HOST, 0, 50)[:] = 1 // 0
        with pytest.raises(StateError, match="does not hold all of the version yet"):
            use.serve()
        use.release()
        assert states(pool) == ["FREE"]
        await captured(pool, "v1", 100)
        await pool.aclose()

    async def test_memory_whose_copy_still_runs_is_given_to_nobody(self) -> None:
        pool = pool_of(generations=1)
        use = await pool.reserve("v1", 1)
        await use.fit({HOST: 100})
        with use.writing():
            use.release()
            assert states(pool) == ["STOPPING"]
            assert not use.wanted
            with pytest.raises(DeadlineExceeded, match="a copy that is being stopped"):
                await pool.reserve("v2", 0.01)
        assert (await pool.reserve("v2", 1)).number == 1
        await pool.aclose()

    async def test_memory_that_the_transport_refuses_leaves_the_generation_usable(self) -> None:
        class Refuses(InprocessAgent):
            refuse = True

            async def register(self, regions: object) -> object:  # type: ignore[override]
                if self.refuse:
                    raise StateError("no")
                return await super().register(regions)  # type: ignore[arg-type]

        agent = Refuses(Hub(), "a")
        pool = GenerationPool(agent)
        use = await pool.reserve("v1", 1)
        with pytest.raises(StateError, match="no"):
            await use.fit({HOST: 100})
        use.release()
        agent.refuse = False
        await captured(pool, "v1")
        await pool.aclose()


class TestTheEnd:
    async def test_what_is_read_at_close_is_taken_from_the_transport_and_never_written(self) -> None:
        pool = pool_of()
        use = await captured(pool, "v1", 100)
        await pool.aclose()
        await pool.aclose()
        assert pool.generations == ()
        with pytest.raises(StateError, match="BeginCopy is not possible"), use.writing():
            pytest.fail("it was written")
        use.release()
        with pytest.raises(StateError, match="closed"):
            await pool.reserve("v2", 1)

    async def test_whoever_waits_is_told(self) -> None:
        pool = pool_of(generations=1)
        await captured(pool, "v1")

        async def wait() -> None:
            with pytest.raises(StateError, match="v2: the trainer client is closed"):
                await pool.reserve("v2", 60)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await pool.aclose()

    async def test_a_copy_that_runs_at_close_is_waited_for(self) -> None:
        pool = pool_of(generations=1)
        use = await pool.reserve("v1", 1)
        await use.fit({HOST: 100})
        async with anyio.create_task_group() as group:
            with use.writing():
                group.start_soon(pool.aclose)
                await anyio.wait_all_tasks_blocked()
                assert states(pool) == ["STOPPING"]
                assert pool.generations[0].registration is not None
        assert pool.generations == ()
