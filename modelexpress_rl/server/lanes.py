"""Group commit: the commands of one version wait in its lane and are committed together.

One task per busy version reads it once, decides everything that waits, and commits that as one
revision; what arrives meanwhile is the next group. A thousand ranks that publish to one version at
once so cost tens of commits. After a conflict, or where something lapsed meanwhile, the group is read
and decided again, within a deadline.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskGroup

from modelexpress_rl import logs, tracing
from modelexpress_rl.server.fold import Answer, Command, Fold, Outcome, fold, unknown
from modelexpress_rl.server.observer import NOBODY, Observer
from modelexpress_rl.server.stores.port import Committed, Store, StoreUnavailable
from statemachines.ids import VersionId
from statemachines.version import Moment, VersionState

# A version may be committed a few times at once. Then a burst gathers: between two commits passes a
# tenth of the time that the burst has lasted, within these bounds. So its length costs commits only by
# the logarithm, and nobody waits for much longer than it takes anyway. A version of many slots is long to
# read and to write: what its commits take is a third of a burst at most.
BURST = 12
PACE_S = 0.015
SLOWEST_PACE_S = 0.1
LONGEST_PACE_S = 1.0


@dataclass(slots=True, eq=False)
class _Waiting:
    command: Command
    done: anyio.Event = field(default_factory=anyio.Event)
    answer: Answer | Exception | None = None
    abandoned: bool = False
    caller: Any = None
    until_s: float = math.inf


@dataclass(slots=True, eq=False)
class _Lane:
    waiting: list[_Waiting] = field(default_factory=list[_Waiting])
    arrived: anyio.Event = field(default_factory=anyio.Event)
    tokens: float = BURST
    counted_at_s: float = 0.0
    burst_from_s: float = 0.0
    commit_took_s: float = 0.0

    @property
    def pace_s(self) -> float:
        gathering_s = min((self.counted_at_s - self.burst_from_s) / 10, SLOWEST_PACE_S)
        return max(PACE_S, gathering_s, min(2 * self.commit_took_s, LONGEST_PACE_S))

    def refill(self, now_s: float) -> None:
        self.tokens = min(BURST, self.tokens + (now_s - self.counted_at_s) / self.pace_s)
        self.counted_at_s = now_s
        if self.tokens >= BURST:
            self.burst_from_s = now_s

    def restart(self, now_s: float) -> None:
        """Waiting gathered nothing: it was one caller after the other, and not a burst."""
        self.burst_from_s = now_s
        self.tokens = max(self.tokens, BURST / 2)


@dataclass(slots=True)
class LaneCounts:
    """For metrics and tests."""

    groups: int = 0
    commits: int = 0
    conflicts: int = 0
    largest_group: int = 0


class Lanes:
    """All lanes of one server; its tasks live in the task group that it is given."""

    def __init__(
        self,
        store: Store,
        tasks: TaskGroup,
        *,
        timeout_s: float,
        perform: Callable[[Fold], None],
        armed: Callable[[int | None], None],
        observer: Observer = NOBODY,
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._perform = perform
        self._armed = armed
        self._observer = observer
        self._lanes: dict[VersionId, _Lane] = {}
        self.counts = LaneCounts()

    @property
    def busy(self) -> int:
        """How many versions have a lane now."""
        return len(self._lanes)

    async def submit(self, uid: VersionId, command: Command) -> Outcome:
        """Have `command` decided and committed.

        Raises:
            Refused: it must not be carried out.
            StoreUnavailable: it could not be committed in time; it may still be.
        """
        until_s = anyio.current_effective_deadline()
        waiting = _Waiting(command, caller=tracing.here(), until_s=until_s)
        self._enter(uid, waiting)
        try:
            with anyio.move_on_after(self._timeout_s + 1):
                await waiting.done.wait()
        finally:
            waiting.abandoned = True
        if waiting.answer is None:
            raise _too_slow(self._timeout_s)
        if isinstance(waiting.answer, Outcome):
            return waiting.answer
        raise waiting.answer

    def _enter(self, uid: VersionId, waiting: _Waiting) -> None:
        lane = self._lanes.get(uid)
        if lane is None:
            now_s = anyio.current_time()
            lane = self._lanes[uid] = _Lane(counted_at_s=now_s, burst_from_s=now_s)
            self._tasks.start_soon(self._drain, uid, lane)
        lane.waiting.append(waiting)
        lane.arrived.set()

    async def _drain(self, uid: VersionId, lane: _Lane) -> None:
        """Commit group after group, until nothing waits and the lane's history no longer matters."""
        logs.only(version_id=uid)  # this task began in the context of its first caller
        while True:
            if not lane.waiting:
                lane.arrived = anyio.Event()
                with anyio.move_on_after(BURST * lane.pace_s):
                    await lane.arrived.wait()
                if not lane.waiting:
                    del self._lanes[uid]
                    return
            lane.refill(anyio.current_time())
            waited = lane.tokens < 1
            if waited:
                await anyio.sleep((1 - lane.tokens) * lane.pace_s)
                lane.refill(anyio.current_time())
            group = [one for one in lane.waiting if not one.abandoned]
            lane.waiting.clear()
            if waited and len(group) == 1:
                lane.restart(anyio.current_time())
            began_s = anyio.current_time()
            if group and await self._answer(uid, group):
                lane.tokens -= 1
                lane.commit_took_s = anyio.current_time() - began_s

    async def _answer(self, uid: VersionId, group: list[_Waiting]) -> bool:
        """Commit `group`; whatever happens, each of it has an answer afterwards.

        False where nothing changed, so that there was nothing to commit.
        """
        committed = False
        self.counts.groups += 1
        self.counts.largest_group = max(self.counts.largest_group, len(group))
        self._observer.group_decided(len(group))
        stopping = StoreUnavailable("the server is stopping: the change may or may not have been made")
        answers: tuple[Answer | Exception, ...] = (stopping,) * len(group)
        # Nor longer than somebody waits: a store in trouble then says so before the last of them gives up.
        patience_s = max(one.until_s for one in group) - anyio.current_time()
        timeout_s = max(0.0, min(self._timeout_s, patience_s))
        try:
            with anyio.fail_after(timeout_s), _span(uid, group):
                answers, committed = await self._commit(uid, [one.command for one in group])
        except TimeoutError:
            answers = (_too_slow(timeout_s),) * len(group)
        except Exception as error:  # noqa: BLE001 - each caller gets it; the lane must go on
            answers = (error,) * len(group)
        finally:
            for one, answer in zip(group, answers, strict=True):
                one.answer = answer
                one.done.set()
        return committed

    async def _commit(self, uid: VersionId, commands: list[Command]) -> tuple[tuple[Answer, ...], bool]:
        """Decide `commands` until the outcome is committed, or changes nothing; the deadline is outside."""
        attempt = 0
        while True:
            wanted = {worker_id for command in commands for worker_id in command.worker_ids}
            read, found = await self._store.read_version_and_workers(uid, wanted)
            if read.stored is None:
                return tuple(unknown(uid) for _ in commands), False
            entry = read.stored.entry
            moment = Moment(read.now_ms, {key: one.record for key, one in found.workers.items()})
            folded = fold(entry, commands, moment)
            if not folded.changed:
                # Renewals move the wake on without a commit; one that comes too early does no harm.
                if read.stored.wake_at_ms is not None and read.stored.wake_at_ms <= read.now_ms:
                    await self._store.rearm(
                        uid, expected_revision=read.stored.revision, wake_at_ms=folded.wake_at_ms
                    )
                    self._armed(folded.wake_at_ms)
                return folded.answers, False
            forgotten = folded.entry.record.state is VersionState.FORGOTTEN
            result = await self._store.commit_version(
                uid,
                None if forgotten else folded.entry,
                expected_revision=read.stored.revision,
                valid_until_ms=folded.valid_until_ms,
                wake_at_ms=folded.wake_at_ms,
            )
            if isinstance(result, Committed):
                self.counts.commits += 1
                self._observer.committed()
                self._armed(folded.wake_at_ms)
                self._perform(folded)
                return folded.answers, True
            self.counts.conflicts += 1
            self._observer.conflicted()
            attempt += 1
            await anyio.sleep(random.random() * min(0.002 * attempt, 0.05))


def _span(uid: VersionId, group: list[_Waiting]) -> AbstractContextManager[Any]:
    """One span for the group, linked to the spans of those who wait for it."""
    if not tracing.active():
        return nullcontext()
    attributes: dict[str, str | int] = {"mx.version_id": uid, "mx.group_size": len(group)}
    return tracing.span("commit group", attributes=attributes, links=[one.caller for one in group])


def _too_slow(timeout_s: float) -> StoreUnavailable:
    return StoreUnavailable(f"the store did not complete the change within {timeout_s:.3g} s")
