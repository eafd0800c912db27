"""Generations in many hands: in whatever order things happen, no reader meets a byte of another version.

Versions, readers and copies that stop half-way are drawn; the memory is a list of cells that copies write
one by one. What is looked at is only that memory, never a guard of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from statemachines import generation as machine
from statemachines.back_pressure import (
    IDLE_USES,
    BackPressure,
    Limits,
    Make,
    Skip,
    Take,
    Wait,
    choose,
    surplus,
)
from statemachines.generation_records import (
    Acquire,
    BeginCopy,
    Close,
    EndCopy,
    Event,
    Free,
    GenerationRecord,
    GenerationState,
    LetGo,
    Retire,
    Serve,
    Serving,
    WantBack,
)
from statemachines.ids import VersionId
from statemachines.kernel import Refused

CELLS = 3
FREE, RETIRED = GenerationState.FREE, GenerationState.RETIRED


@dataclass
class Memory:
    """A generation and the cells that copies write."""

    record: GenerationRecord
    cells: list[str] = field(default_factory=lambda: [""] * CELLS)
    last_used: int = 0


@dataclass
class Version:
    """A version that has been given a generation, as its publication sees it."""

    name: str
    memory: Memory
    use: int
    written: int = 0
    copying: bool = False
    readers: int = 0
    served: bool = False
    over: bool = False


class Trainer(RuleBasedStateMachine):
    """A trainer that captures, publishes and releases versions, and readers that take their time."""

    versions: Bundle[Version] = Bundle("versions")

    @initialize(policy=st.sampled_from(BackPressure), generations=st.integers(1, 2), more=st.integers(0, 2))
    def begin(self, policy: BackPressure, generations: int, more: int) -> None:
        self.limits = Limits(generations, generations + more, policy)
        self.memories: list[Memory] = []
        self.alive: list[Version] = []
        self.made = self.uses = 0
        self.closed = False

    def tell(self, memory: Memory, event: Event) -> bool:
        """Whether the machine accepts the event; a refusal changes nothing."""
        before = memory.record
        try:
            memory.record = machine.decide(before, event).record
        except Refused:
            assert memory.record is before
            return False
        return True

    @rule(target=versions)
    def capture(self) -> Version:
        records = [memory.record for memory in self.memories]
        choice = Wait() if self.closed else choose(records, self.limits)
        held = sum(record.state is not FREE for record in records if record.state is not RETIRED)
        if isinstance(choice, Make):
            assert choice.grown is (len(self.living()) >= self.limits.generations)
            self.memories.append(Memory(GenerationRecord(len(self.memories) + 1)))
            choice = Take(len(self.memories))
        if not isinstance(choice, Take):
            assert self.closed or held == self.limits.most
            assert isinstance(choice, Skip) is (self.limits.policy is BackPressure.SKIP and not self.closed)
            return Version("none", Memory(GenerationRecord(0)), 1, over=True)
        self.made += 1
        self.uses += 1
        memory = self.memories[choice.number - 1]
        assert self.tell(memory, Acquire(VersionId(f"v{self.made}")))
        memory.last_used = self.uses
        version = Version(f"v{self.made}", memory, memory.record.use)
        self.alive.append(version)
        return version

    @rule(version=versions)
    def begin_copy(self, version: Version) -> None:
        if self.tell(version.memory, BeginCopy(version.use)):
            assert not version.copying
            version.copying, version.written = True, 0

    @rule(version=versions)
    def write(self, version: Version) -> None:
        """A copy that was begun writes on, whatever is said meanwhile: threads don't stop at once."""
        if version.copying and version.written < CELLS:
            version.memory.cells[version.written] = version.name
            version.written += 1

    @rule(version=versions)
    def end_copy(self, version: Version) -> None:
        if version.copying:
            version.copying = False
            assert self.tell(version.memory, EndCopy(version.use, version.written == CELLS))
            if version.over:
                assert version.memory.record.state is FREE

    @rule(version=versions, is_read=st.booleans())
    def publish(self, version: Version, is_read: bool) -> None:
        self.begin_copy(version)
        for _ in range(CELLS):
            self.write(version)
        self.end_copy(version)
        self.serve(version)
        if is_read:
            self.read(version)

    @rule(version=versions)
    def serve(self, version: Version) -> None:
        if self.tell(version.memory, Serve(version.use)):
            assert not version.over
            version.served = True

    @rule(version=versions)
    def read(self, version: Version) -> None:
        if version.served and not version.over:
            version.readers += 1

    @rule(version=versions)
    def stop_reading(self, version: Version) -> None:
        version.readers = max(0, version.readers - 1)

    @rule(version=versions)
    def want_back(self, version: Version) -> None:
        self.tell(version.memory, WantBack(version.use))
        if version.served and not version.over and not self.closed:
            assert version.memory.record.state is GenerationState.DRAINING

    @rule(version=versions)
    def let_go(self, version: Version) -> None:
        """As the publication does once it has drained."""
        if not version.readers and not version.over:
            version.over = True
            self.tell(version.memory, LetGo(version.use))
            stops = GenerationState.STOPPING if version.copying else FREE
            assert version.memory.record.state in (stops, RETIRED)

    @rule(version=consumes(versions))
    def release(self, version: Version) -> None:
        self.want_back(version)
        version.readers = 0
        self.let_go(version)

    @rule(version=versions)
    def publish_half(self, version: Version) -> None:
        self.begin_copy(version)
        self.write(version)
        self.end_copy(version)
        self.serve(version)
        self.read(version)

    @rule()
    def retire(self) -> None:
        records = [memory.record for memory in self.memories]
        number = surplus(records, [memory.last_used for memory in self.memories], self.uses, self.limits)
        if number is not None:
            assert len(self.living()) > self.limits.generations
            assert self.tell(self.memories[number - 1], Retire())

    @rule()
    def close(self) -> None:
        if len(self.memories) < self.limits.generations:
            return  # a trainer that closes at once tells little
        self.closed = True
        for memory in self.memories:
            self.tell(memory, Close())
        written = {id(version.memory) for version in self.alive if version.copying}
        assert all((one.record.state is RETIRED) is (id(one) not in written) for one in self.memories)
        for version in self.alive:
            version.over |= version.copying  # it is given up

    @invariant()
    def nobody_reads_another_version(self) -> None:
        for version in getattr(self, "alive", []):
            if version.readers:
                assert version.memory.cells == [version.name] * CELLS

    @invariant()
    def what_is_said_late_changes_nothing(self) -> None:
        for version in getattr(self, "alive", []):
            before, use = version.memory.record, version.use
            if use < before.use:
                for event in (BeginCopy(use), EndCopy(use, True), Serve(use), WantBack(use), LetGo(use)):
                    self.tell(version.memory, event)
                    assert version.memory.record == before

    @invariant()
    def what_is_free_is_written_by_nobody(self) -> None:
        for version in getattr(self, "alive", []):
            if version.copying:
                assert version.memory.record.state not in (FREE, RETIRED)
                assert version.memory.record.use == version.use

    def living(self) -> list[Memory]:
        return [memory for memory in self.memories if memory.record.state is not RETIRED]


TestTrainer = pytest.mark.timeout(120)(Trainer.TestCase)
TestTrainer.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def records(*busy: bool) -> list[GenerationRecord]:
    return [
        GenerationRecord(n + 1, 1, Serving(VersionId("v")) if one else Free()) for n, one in enumerate(busy)
    ]


@pytest.mark.parametrize(
    ("busy", "policy", "choice"),
    [
        ((), "WAIT", Make(grown=False)),
        ((True,), "WAIT", Make(grown=False)),
        ((True, False), "WAIT", Take(2)),
        ((False, False), "WAIT", Take(1)),
        ((True, True), "WAIT", Wait()),
        ((True, True), "SKIP", Skip()),
        ((True, True), "GROW", Make(grown=True)),
        ((True, True, True), "GROW", Wait()),
        ((True, True, False), "GROW", Take(3)),
    ],
)
def test_who_gets_what(busy: tuple[bool, ...], policy: str, choice: object) -> None:
    assert choose(records(*busy), Limits(2, 3, BackPressure(policy))) == choice


def test_what_was_grown_goes_once_it_rested_long_enough() -> None:
    limits = Limits(1, 3, BackPressure.GROW)
    assert surplus(records(False, False, False), [40, 3, 2], 40, limits) == 3
    assert surplus(records(False, False, True), [40, 3, 2], 40, limits) == 2
    assert surplus(records(False, False), [40, 40 - IDLE_USES], 40, limits) is None
    assert surplus(records(False), [0], 40, limits) is None
    assert surplus([*records(False), GenerationRecord(2, 1, machine.Retired())], [0, 0], 40, limits) is None
