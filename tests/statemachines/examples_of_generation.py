"""Examples of the generation machine."""

from __future__ import annotations

from dataclasses import replace

from statemachines import generation
from statemachines.generation_records import (
    Acquire,
    BeginCopy,
    Capturing,
    Close,
    Deregister,
    Draining,
    EndCopy,
    Free,
    GenerationRecord,
    GenerationState,
    LetGo,
    Phase,
    Retire,
    Retired,
    Serve,
    Serving,
    Stopping,
    TellFree,
    WantBack,
)
from statemachines.ids import VersionId
from statemachines.kernel import Reason
from tests.statemachines.examples import Example, Machine, refused

FREE, CAPTURING, STOPPING, SERVING, DRAINING, RETIRED = GenerationState
V = VersionId("v")


def in_phase(phase: Phase, use: int = 2) -> GenerationRecord:
    return GenerationRecord(1, use, phase)


BEGUN, COPYING, WHOLE = (
    in_phase(Capturing(V)),
    in_phase(Capturing(V, True)),
    in_phase(Capturing(V, False, True)),
)
READ, WANTED, HALTED = in_phase(Serving(V)), in_phase(Draining(V)), in_phase(Stopping())
UNUSED, GONE = in_phase(Free()), in_phase(Retired())


def example(
    record: GenerationRecord, event: object, to: GenerationState, changes: bool, *effects: type
) -> Example:
    return Example(record, event, None, to, changes, effects=effects)


def late(record: GenerationRecord, *events: type) -> list[Example]:
    """What is said about the use before changes nothing."""
    given = [EndCopy(1, True) if event is EndCopy else event(1) for event in events]
    return [example(record, event, record.state, False) for event in given]


GENERATION = Machine(
    generation.TABLE,
    generation,
    {FREE: UNUSED, CAPTURING: BEGUN, STOPPING: HALTED, SERVING: READ, DRAINING: WANTED, RETIRED: GONE},
    {
        type(event): event
        for event in (
            Acquire(V),
            BeginCopy(2),
            EndCopy(2, True),
            Serve(2),
            WantBack(2),
            LetGo(2),
            Retire(),
            Close(),
        )
    },
    None,
    (
        Example(UNUSED, Acquire(V), None, CAPTURING, True, effects=()),
        Example(in_phase(Capturing(V), 1), BeginCopy(1), None, CAPTURING, True, effects=()),
        refused(BEGUN, BeginCopy(1), None, Reason.PRECONDITION, "is in its use 2, use 1 of it is over"),
        refused(COPYING, BeginCopy(2), None, Reason.PRECONDITION, "(version v) is being written"),
        example(WHOLE, BeginCopy(2), CAPTURING, True),
        example(COPYING, EndCopy(2, True), CAPTURING, True),
        example(COPYING, EndCopy(2, False), CAPTURING, True),
        *late(COPYING, EndCopy, LetGo),
        *late(BEGUN, LetGo),
        example(WHOLE, Serve(2), SERVING, True),
        refused(WHOLE, Serve(1), None, Reason.PRECONDITION, "use 1 of it is over"),
        refused(BEGUN, Serve(2), None, Reason.PRECONDITION, "does not hold all of the version yet"),
        refused(COPYING, Serve(2), None, Reason.PRECONDITION, "does not hold all of the version yet"),
        example(BEGUN, WantBack(2), CAPTURING, False),
        example(COPYING, LetGo(2), STOPPING, True),
        example(BEGUN, LetGo(2), FREE, True, TellFree),
        example(WHOLE, LetGo(2), FREE, True, TellFree),
        *late(HALTED, EndCopy),
        example(HALTED, EndCopy(2, False), FREE, True, TellFree),
        *late(READ, WantBack, LetGo, EndCopy),
        example(READ, WantBack(2), DRAINING, True),
        example(READ, LetGo(2), FREE, True, TellFree),
        *late(WANTED, WantBack, LetGo, EndCopy),
        example(WANTED, WantBack(2), DRAINING, False),
        example(WANTED, LetGo(2), FREE, True, TellFree),
        example(UNUSED, Retire(), RETIRED, True, Deregister),
        *(
            example(record, Close(), RETIRED, True, Deregister)
            for record in (UNUSED, READ, WANTED, BEGUN, WHOLE)
        ),
        example(COPYING, Close(), STOPPING, True),
        *(
            refused(record, BeginCopy(2), None, Reason.PRECONDITION, "not possible then")
            for record in (READ, WANTED)
        ),
        *(
            refused(record, Acquire(V), None, Reason.PRECONDITION, "not possible")
            for record in (BEGUN, READ, HALTED)
        ),
        refused(
            READ, Retire(), None, Reason.PRECONDITION, "generation 1 (version v) is SERVING: Retire is not"
        ),
        refused(replace(UNUSED, use=9), Serve(9), None, Reason.PRECONDITION, "generation 1 is FREE"),
    ),
)
