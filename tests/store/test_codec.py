"""What is read is what was written, and what is damaged is never half understood."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelexpress_rl.server.stores import codec
from modelexpress_rl.server.stores.port import KeyHolder, StoredRecordError, VersionEntry
from statemachines.worker import WorkerRecord
from tests.store.records import entry, retired, spec, version_entries, worker, worker_records


@given(version_entries)
def test_versions_come_back_as_they_were(written: VersionEntry) -> None:
    assert codec.decode_version(written.record.uid, codec.encode_version(written)) == written


@given(worker_records)
def test_workers_come_back_as_they_were(written: WorkerRecord) -> None:
    assert codec.decode_worker(written.worker_id, codec.encode_worker(written)) == written


def test_key_holders_come_back_as_they_were() -> None:
    written = KeyHolder("uid", spec("key"))
    assert codec.decode_holder("key", codec.encode_holder(written)) == written


@given(st.data())
def test_a_damaged_version_is_refused_by_name(data: st.DataObject) -> None:
    text = codec.encode_version(data.draw(st.sampled_from([entry("v", 1), retired("v", 1)])))
    body = json.loads(text)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text) - 1))
        damaged = text[:at]
    else:
        path = data.draw(st.sampled_from(["uid", "spec", "created_at_ms", "sequence", "phase", "schema"]))
        body[path] = data.draw(st.sampled_from([None, [], "?", -1, True, {"state": "FORGOTTEN"}]))
        damaged = json.dumps(body)
    with pytest.raises(StoredRecordError, match="version 'v'"):
        codec.decode_version("v", damaged)


def test_a_newer_schema_is_named() -> None:
    body = json.loads(codec.encode_worker(worker("w"))) | {"schema": 2}
    with pytest.raises(StoredRecordError, match="schema is 2, this release reads 1"):
        codec.decode_worker("w", json.dumps(body))
