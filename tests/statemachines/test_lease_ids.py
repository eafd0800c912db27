"""Two workers whose ids make the same 32-bit lease id on one version never share a lease."""

from __future__ import annotations

import logging

import pytest

from statemachines import version
from statemachines.ids import LeaseId, ModelName, SlotId, VersionId, WorkerId, lease_id_of
from statemachines.kernel import Refused
from statemachines.spec import PayloadFormat, VersionSpec
from statemachines.version_records import AcquireLease, Moment, Publication, PublishShard, RenewLease
from statemachines.worker import WorkerRecord, WorkerRole

MODEL = ModelName("m")
UID = VersionId("v")
ONE, OTHER = WorkerId("w39493"), WorkerId("w97228")


def _ready() -> tuple[version.VersionRecord, Moment]:
    generators = {w: WorkerRecord(w, WorkerRole.GENERATOR, MODEL, 1, 1000) for w in (ONE, OTHER)}
    trainer = WorkerRecord(WorkerId("t"), WorkerRole.TRAINER, MODEL, 1, 1000)
    moment = Moment(10, {**generators, trainer.worker_id: trainer})
    spec = VersionSpec(MODEL, "k", PayloadFormat.FULL_TENSOR, (SlotId("s"),))
    shard = Publication(SlotId("s"), trainer.worker_id, 1, 2, "digest", "host:1")
    return version.decide(version.begin(UID, spec, 0, 1), PublishShard(shard), moment).record, moment


def test_the_ids_collide() -> None:
    assert lease_id_of(UID, ONE) == lease_id_of(UID, OTHER) == LeaseId("d9018e99")


def test_the_second_worker_is_refused_and_the_first_keeps_its_lease() -> None:
    record, moment = _ready()
    record = version.decide(record, AcquireLease(ONE, 50), moment).record
    with pytest.raises(Refused, match="register one of them under another id"):
        version.decide(record, AcquireLease(OTHER, 50), moment)
    with pytest.raises(Refused, match="w97228 holds no live lease"):
        version.decide(record, RenewLease(OTHER, 50), moment)
    version.decide(record, RenewLease(ONE, 50), moment)


def test_a_lapsed_lease_makes_room() -> None:
    record, moment = _ready()
    record = version.decide(record, AcquireLease(ONE, 50), moment).record
    later = Moment(60, moment.workers)
    record = version.decide(version.settle(record, later).record, AcquireLease(OTHER, 50), later).record
    assert [held.worker_id for held in record.leases.values()] == [OTHER]


def test_decisions_do_not_fill_a_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        record, moment = _ready()
        version.decide(record, AcquireLease(ONE, 50), moment)
    assert not caplog.records
