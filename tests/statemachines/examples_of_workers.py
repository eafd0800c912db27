"""Examples of the worker machine and of the lease machine."""

from __future__ import annotations

from dataclasses import replace

from statemachines import lease, worker
from statemachines.ids import LeaseId, ModelName, VersionId, WorkerId
from statemachines.kernel import Reason
from statemachines.lease import Lapse, LeaseEnded, LeaseRecord, LeaseState, Renew, Return
from statemachines.worker import (
    Expire,
    Leave,
    Register,
    Report,
    WorkerLost,
    WorkerRecord,
    WorkerRole,
    WorkerState,
)
from tests.statemachines.examples import Example, Machine, refused

LIVE, EXPIRED = WorkerState
HELD, RETURNED, LAPSED = LeaseState
TRAINER = Register(WorkerRole.TRAINER, ModelName("m"), 100, 2)
RUNNING = worker.begin(WorkerId("t"), replace(TRAINER, life=1), 0)
SERVING = WorkerRecord(WorkerId("g"), WorkerRole.GENERATOR, ModelName("m"), 1, 100)
OVER = replace(RUNNING, state=EXPIRED)
REPORT = Report(VersionId("v"), uncertain=False)

WORKER = Machine(
    worker.TABLE,
    worker,
    {LIVE: SERVING, EXPIRED: OVER},
    {type(event): event for event in (TRAINER, Expire(), Leave(), REPORT)},
    50,
    (
        Example(RUNNING, TRAINER, 50, LIVE, True, effects=()),
        Example(RUNNING, TRAINER, 0, LIVE, False, effects=()),
        Example(RUNNING, TRAINER, 100, LIVE, True, effects=(WorkerLost,)),
        Example(SERVING, TRAINER, 100, LIVE, True, effects=(WorkerLost,)),
        refused(SERVING, TRAINER, 50, Reason.EXISTS, "g is registered as GENERATOR"),
        refused(
            RUNNING, replace(TRAINER, model_name=ModelName("n")), 50, Reason.EXISTS, "not as TRAINER of 'n'"
        ),
        Example(RUNNING, Expire(), 99, LIVE, False, effects=()),
        Example(RUNNING, Expire(), 100, EXPIRED, True, effects=(WorkerLost,)),
        Example(RUNNING, Leave(), 50, EXPIRED, True, effects=(WorkerLost,)),
        Example(SERVING, REPORT, 50, LIVE, True, effects=()),
        Example(SERVING, REPORT, 100, EXPIRED, True, effects=(WorkerLost,)),
        refused(RUNNING, REPORT, 50, Reason.PRECONDITION, "only a GENERATOR serves"),
        Example(OVER, TRAINER, 50, LIVE, True, effects=(WorkerLost,)),
        *(Example(OVER, event, 50, EXPIRED, False, effects=()) for event in (Expire(), Leave(), REPORT)),
    ),
)

LEASE_HELD = LeaseRecord(LeaseId("l"), WorkerId("g"), 100)
LEASE_RETURNED, LEASE_LAPSED = (replace(LEASE_HELD, state=state) for state in (RETURNED, LAPSED))

LEASE = Machine(
    lease.TABLE,
    lease,
    {HELD: LEASE_HELD, RETURNED: LEASE_RETURNED, LAPSED: LEASE_LAPSED},
    {type(event): event for event in (Renew(200), Return(), Lapse())},
    50,
    (
        Example(LEASE_HELD, Renew(101), 99, HELD, True, effects=()),
        Example(LEASE_HELD, Renew(99), 50, HELD, False, effects=()),
        refused(LEASE_HELD, Renew(200), 100, Reason.PRECONDITION, "lapsed 0 ms ago"),
        Example(LEASE_HELD, Return(), 99, RETURNED, True, effects=(LeaseEnded,)),
        Example(LEASE_HELD, Return(), 100, LAPSED, True, effects=(LeaseEnded,)),
        Example(LEASE_HELD, Lapse(), 99, HELD, False, effects=()),
        Example(LEASE_HELD, Lapse(), 100, LAPSED, True, effects=(LeaseEnded,)),
        *(
            Example(record, event, 200, record.state, False, effects=())
            for record in (LEASE_RETURNED, LEASE_LAPSED)
            for event in (Return(), Lapse())
        ),
        *(
            refused(record, Renew(300), 50, Reason.PRECONDITION, "Renew is not possible then")
            for record in (LEASE_RETURNED, LEASE_LAPSED)
        ),
    ),
)
