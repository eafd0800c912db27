"""0.7.0's control client and stubs against `mx-rl serve`: every answer of the wire that they can provoke."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import serve
from tests.interop.peers import Peer, Pool, Raised

S3 = {"storage_type": "S3", "uri": "s3://bucket/run/v1"}
SHARD = {
    "tensor_count": 1,
    "total_bytes": 4,
    "manifest_digest": "d" * 64,
    "manifest_endpoint": "127.0.0.1:1",
}


class Job:
    """A peer with a control plane of its own kind of store, and a model that no other test has."""

    def __init__(self, peer: Peer, model: str) -> None:
        self.peer = peer
        self.model = model

    def uid(self, name: str) -> str:
        return f"{self.model}/{name}"

    def create(self, name: str, **more: Any) -> dict[str, Any]:
        arguments = {
            "model_name": self.model,
            "idempotency_key": f"key {self.uid(name)}",
            "payload_format": "FULL_TENSOR",
            "uid": self.uid(name),
        }
        if "object_storage" not in more:
            arguments["expected_source_slots"] = ["s0", "s1"]
        return self.peer.call("control", method="create_weight_version", **(arguments | more))

    def stored(self, name: str, **more: Any) -> dict[str, Any]:
        return self.create(name, object_storage=S3, **({"payload_format": "FULL_HF_CHECKPOINT"} | more))

    def get(self, name: str) -> dict[str, Any]:
        return self.peer.call("control", method="get_weight_version", version_id=self.uid(name))

    def update(self, name: str, state: str) -> dict[str, Any]:
        return self.peer.call(
            "control", method="update_weight_version_state", version_id=self.uid(name), state=state
        )

    def delete(self, name: str) -> dict[str, Any]:
        return self.peer.call("control", method="delete_weight_version", version_id=self.uid(name))

    def raw(self, rpc: str, **request: Any) -> dict[str, Any]:
        return self.peer.call("raw", rpc=rpc, request=request)

    def register(self, name: str, role: str = "TRAINER", model: str | None = None, ttl: int = 60) -> str:
        worker_id = self.uid(name)
        worker = {"worker_id": worker_id, "role": f"WORKER_ROLE_{role}", "model_name": model or self.model}
        self.raw("RegisterWorker", worker=worker, ttl_seconds=ttl)
        return worker_id

    def publish(self, name: str, slot: str, worker: str, **more: Any) -> dict[str, Any]:
        ids = {"version_id": self.uid(name), "source_slot_id": slot, "worker_id": self.uid(worker)}
        return self.raw("CreateWeightVersionShard", shard=ids | SHARD | more)

    def lease(self, name: str, worker: str, ttl: int = 60) -> dict[str, Any]:
        request = {"version_id": self.uid(name), "worker_id": self.uid(worker), "ttl_seconds": ttl}
        return self.raw("RegisterVersionLease", **request)["lease"]

    def give_back(self, name: str, lease_id: str, worker: str) -> bool:
        request = {"version_id": self.uid(name), "lease_id": lease_id, "worker_id": self.uid(worker)}
        return self.raw("DeleteVersionLease", **request).get("deleted", False)

    def withdraw(self, name: str, slot: str, worker: str) -> dict[str, Any]:
        ids = {"version_id": self.uid(name), "source_slot_id": slot, "worker_id": self.uid(worker)}
        return self.raw("DeleteWeightVersionShard", **ids)

    def make_ready(self, name: str) -> None:
        self.create(name)
        for slot, worker in (("s0", "t0"), ("s1", "t1")):
            self.register(worker)
            self.publish(name, slot, worker)


@pytest.fixture(scope="module")
def control(pool: Pool) -> Peer:
    [peer] = pool.take("peer_control.py")
    return peer


@pytest.fixture(scope="module", params=["memory", "sqlite"])
def peer(
    request: pytest.FixtureRequest, control: Peer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Peer]:
    folder = tmp_path_factory.mktemp("store")
    with serve("memory" if request.param == "memory" else f"sqlite:{folder / 'store.db'}") as (_, address):
        control.call("connect", address=address)
        yield control


@pytest.fixture
def job(peer: Peer, request: pytest.FixtureRequest) -> Job:
    return Job(peer, f"model of {request.node.originalname}")


def refused(code: str, call: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(Raised) as caught:
        call(*arguments, **named)
    assert caught.value.code == code, caught.value


def test_the_health_of_the_service(job: Job) -> None:
    assert job.peer.call("health", service="model_express.refit.RefitService") == 1


def test_a_version_from_beginning_to_end(job: Job) -> None:
    made = job.create("v", uid=None)
    assert len(bytes.fromhex(made["version_id"])) == 4
    assert made["model_name"] == job.model
    assert made["expected_source_slots"] == ["s0", "s1"]
    assert (made["payload_format"], made["state"]) == ("FULL_TENSOR", "STAGING")
    assert made["base_version_id"] is made["object_storage"] is None
    assert made["created_at_unix_ms"] > 1_600_000_000_000
    uid = made["version_id"]
    assert job.create("v", uid=None) == made
    assert job.peer.call("control", method="get_weight_version", version_id=uid) == made
    deleted = job.peer.call("control", method="delete_weight_version", version_id=uid)
    assert deleted == made | {"state": "RELEASING"}
    assert job.peer.call("control", method="delete_weight_version", version_id=uid) == deleted
    assert job.create("v", uid=None) == deleted  # a repeat answers the record, whatever its state


def test_creation_refused(job: Job) -> None:
    def wrong(request: dict[str, Any], **changed: Any) -> None:
        refused("INVALID_ARGUMENT", job.raw, "CreateWeightVersion", **(request | changed))

    base = {"model_name": job.model, "idempotency_key": "k", "state": 1}
    full = base | {"expected_source_slots": ["s"], "payload_format": 1}
    for field in ("model_name", "idempotency_key", "uid"):
        wrong(full, **{field: " "})
    for slots in ([], ["s", "s"], [" "]):
        wrong(full, expected_source_slots=slots)
    for number in (0, 2, 3, 9):  # READY and RELEASING are no beginning for slots
        wrong(full, state=number)
    for number in (0, 9):
        wrong(full, payload_format=number)
    wrong(full, base_version_id="b")
    wrong(full, payload_format=3)  # a checkpoint, and nowhere
    wrong(full, payload_format=2)  # a delta, on nothing

    storage = {"uri": S3["uri"], "storage_type": 1}
    stored = base | {"payload_format": 3, "object_storage": storage}
    wrong(stored, expected_source_slots=["s"])
    wrong(stored, base_version_id="b")
    wrong(stored, payload_format=2)
    wrong(stored, state=3)
    for number in (0, 2, 3, 9):
        wrong(stored, object_storage=storage | {"storage_type": number})
    for uri in ("s3://bucket", "s3://bucket/a//b", "s3://bucket/a?b", "s3://bucket/a#b", "http://b/a", ""):
        wrong(stored, object_storage=storage | {"uri": uri})


def test_what_the_client_lets_through_is_refused_by_the_server(job: Job) -> None:
    refused("INVALID_ARGUMENT", job.create, "v", expected_source_slots=["s", "s"])
    refused("INVALID_ARGUMENT", job.create, "v", state="READY")
    refused("INVALID_ARGUMENT", job.create, "v", base_version_id="b")
    refused("INVALID_ARGUMENT", job.create, "v", payload_format="FULL_HF_CHECKPOINT")


def test_keys_and_uids_that_are_taken(job: Job) -> None:
    made = job.create("v", idempotency_key=job.uid("k"))
    assert job.create("v", idempotency_key=job.uid("k")) == made
    refused("ALREADY_EXISTS", job.create, "v", idempotency_key=job.uid("k"), expected_source_slots=["s0"])
    refused("ALREADY_EXISTS", job.create, "w", idempotency_key=job.uid("k"))
    refused("ALREADY_EXISTS", job.create, "v", idempotency_key=job.uid("other"))


def test_the_base_of_a_delta(job: Job) -> None:
    def delta(name: str, **more: Any) -> dict[str, Any]:
        about = {"payload_format": "XOR_DELTA", "state": "READY", "base_version_id": job.uid("base")}
        return job.stored(name, **(about | more))

    refused("NOT_FOUND", delta, "d")
    job.stored("base")
    refused("FAILED_PRECONDITION", delta, "d")
    job.update("base", "READY")
    refused("FAILED_PRECONDITION", delta, "d", model_name="another")
    made = delta("d")
    assert (made["base_version_id"], made["state"]) == (job.uid("base"), "READY")
    job.delete("base")
    assert delta("d") == made
    refused("FAILED_PRECONDITION", delta, "e")


def test_object_storage(job: Job) -> None:
    made = job.stored("v")
    assert made["object_storage"] == S3
    assert (made["state"], made["expected_source_slots"]) == ("STAGING", [])
    refused("FAILED_PRECONDITION", job.lease, "v", job.register("g", "GENERATOR") and "g")
    for _ in range(2):
        assert job.update("v", "READY")["state"] == "READY"
    assert job.raw("ListWeightVersionShards", version_id=job.uid("v")) == {}
    job.register("t")
    refused("FAILED_PRECONDITION", job.publish, "v", "s0", "t")
    refused("FAILED_PRECONDITION", job.update, "v", "STAGING")
    assert job.lease("v", "g")
    for _ in range(2):
        assert job.update("v", "RELEASING")["state"] == "RELEASING"
    refused("FAILED_PRECONDITION", job.update, "v", "READY")
    assert job.stored("ready", state="READY")["state"] == "READY"


def test_states_of_a_version_with_slots(job: Job) -> None:
    job.create("v")
    assert job.update("v", "STAGING")["state"] == "STAGING"
    refused("FAILED_PRECONDITION", job.update, "v", "READY")
    assert job.update("v", "RELEASING")["state"] == "RELEASING"
    refused("FAILED_PRECONDITION", job.update, "v", "STAGING")
    refused("FAILED_PRECONDITION", job.update, "v", "READY")
    raw = {"uid": job.uid("v"), "state": 0}
    refused("INVALID_ARGUMENT", job.raw, "UpdateWeightVersionState", **raw)
    refused("INVALID_ARGUMENT", job.raw, "UpdateWeightVersionState", **(raw | {"state": 9}))


def test_an_unknown_version(job: Job) -> None:
    refused("NOT_FOUND", job.get, "v")
    refused("NOT_FOUND", job.update, "v", "RELEASING")
    refused("NOT_FOUND", job.delete, "v")
    refused("NOT_FOUND", job.publish, "v", "s0", "t")
    refused("NOT_FOUND", job.raw, "ListWeightVersionShards", version_id=job.uid("v"))
    refused("NOT_FOUND", job.withdraw, "v", "s0", "t")
    job.register("g", "GENERATOR")
    refused("NOT_FOUND", job.lease, "v", "g")
    assert not job.give_back("v", "00000000", "g")


def test_blank_fields(job: Job) -> None:
    def blank(rpc: str, **request: Any) -> None:
        refused("INVALID_ARGUMENT", job.raw, rpc, **request)

    for rpc in ("GetWeightVersion", "DeleteWeightVersion"):
        blank(rpc, uid=" ")
    blank("UpdateWeightVersionState", uid="", state=3)
    blank("ListWeightVersionShards", version_id="")
    worker = {"worker_id": "w", "role": 1, "model_name": job.model}
    for changed in ({"worker_id": " "}, {"model_name": ""}, {"role": 0}, {"role": 9}):
        blank("RegisterWorker", worker=worker | changed, ttl_seconds=5)
    blank("RegisterWorker", worker=worker, ttl_seconds=0)
    blank("RegisterWorker", ttl_seconds=5)
    ids = {"version_id": "v", "source_slot_id": "s", "worker_id": "w"}
    for name in ids:
        blank("DeleteWeightVersionShard", **(ids | {name: ""}))
        blank("CreateWeightVersionShard", shard=ids | SHARD | {name: " "})
    for name in ("manifest_digest", "manifest_endpoint"):
        blank("CreateWeightVersionShard", shard=ids | SHARD | {name: ""})
    lease = {"version_id": "v", "worker_id": "w", "ttl_seconds": 5}
    for changed in ({"version_id": ""}, {"worker_id": ""}, {"ttl_seconds": 0}):
        blank("RegisterVersionLease", **(lease | changed))
    given_back = {"version_id": "v", "lease_id": "l", "worker_id": "w"}
    for name in given_back:
        blank("DeleteVersionLease", **(given_back | {name: ""}))


def test_workers(job: Job) -> None:
    job.register("w")
    job.register("w")
    refused("ALREADY_EXISTS", job.register, "w", "GENERATOR")
    refused("ALREADY_EXISTS", job.register, "w", model="another")


def test_publications_in_the_order_of_the_checks(job: Job) -> None:
    job.create("v")
    refused("FAILED_PRECONDITION", job.publish, "v", "odd", "t0")  # nobody by that name
    job.register("stranger", model="another")
    refused("FAILED_PRECONDITION", job.publish, "v", "odd", "stranger")
    job.register("t0")
    refused("INVALID_ARGUMENT", job.publish, "v", "odd", "t0")
    answer = job.publish("v", "s0", "t0")
    assert answer["version"]["state"] == "WEIGHT_VERSION_STATE_STAGING"
    assert job.publish("v", "s0", "t0") == answer
    refused("ALREADY_EXISTS", job.publish, "v", "s0", "t0", manifest_digest="e" * 64)
    job.register("t1")
    assert job.publish("v", "s1", "t1")["version"]["state"] == "WEIGHT_VERSION_STATE_READY"
    assert job.get("v")["state"] == "READY"
    assert job.publish("v", "s0", "t1")["version"]["state"] == "WEIGHT_VERSION_STATE_READY"  # a replica
    listed = job.raw("ListWeightVersionShards", version_id=job.uid("v"))["shards"]
    assert [(shard["source_slot_id"], shard["worker_id"]) for shard in listed] == [
        ("s0", job.uid("t0")),
        ("s0", job.uid("t1")),
        ("s1", job.uid("t1")),
    ]
    assert listed[0].items() >= {"total_bytes": "4", "manifest_endpoint": "127.0.0.1:1"}.items()
    job.delete("v")
    refused("FAILED_PRECONDITION", job.publish, "v", "odd", "t0")


def test_leases(job: Job) -> None:
    job.create("staging")
    job.register("g", "GENERATOR")
    refused("FAILED_PRECONDITION", job.lease, "staging", "g")
    job.make_ready("v")
    refused("FAILED_PRECONDITION", job.lease, "v", "nobody")
    refused("FAILED_PRECONDITION", job.lease, "v", "t0")  # a trainer
    job.register("stranger", "GENERATOR", model="another")
    refused("FAILED_PRECONDITION", job.lease, "v", "stranger")
    lease = job.lease("v", "g")
    pair = f"{job.uid('v')}\0{job.uid('g')}".encode()
    assert lease["lease_id"] == hashlib.sha256(pair).hexdigest()[:8]
    assert (lease["version_id"], lease["worker_id"]) == (job.uid("v"), job.uid("g"))
    assert int(job.lease("v", "g")["expires_at_unix_ms"]) >= int(lease["expires_at_unix_ms"])
    refused("FAILED_PRECONDITION", job.give_back, "v", lease["lease_id"], "t0")
    refused("FAILED_PRECONDITION", job.withdraw, "v", "s0", "t0")  # it is READY
    job.delete("v")
    assert job.lease("v", "g")  # a live lease is renewed while it is released
    job.register("late", "GENERATOR")
    refused("FAILED_PRECONDITION", job.lease, "v", "late")
    refused("FAILED_PRECONDITION", job.withdraw, "v", "s0", "t0")  # somebody reads
    assert job.give_back("v", lease["lease_id"], "g")
    assert not job.give_back("v", lease["lease_id"], "g")
    refused("FAILED_PRECONDITION", job.lease, "v", "g")
    assert job.withdraw("v", "s0", "t0") == {"deleted": True}
    refused("NOT_FOUND", job.withdraw, "v", "s0", "t0")
    refused("NOT_FOUND", job.withdraw, "v", "s0", "t1")


@pytest.mark.parametrize("uid", ["run:7", "..", "foo:shards", "{foo}", "漢字", " v "])
def test_odd_uids(job: Job, uid: str) -> None:
    made = job.create("v", uid=f"{job.model}{uid}", idempotency_key=f"{job.model} of {uid}")
    assert made["version_id"] == f"{job.model}{uid}"
    found = job.peer.call("control", method="get_weight_version", version_id=made["version_id"])
    assert found == made


def test_a_server_that_went_away_and_came_back(control: Peer, tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    client = Job(control, "m")
    with serve(store) as (_, address):
        control.call("connect", address=address)
        made = client.create("v")
    refused("UNAVAILABLE", client.get, "v")
    with serve(store, int(address.rpartition(":")[2])):
        assert until_it_answers(client, "v") == made


def test_tokens_that_rotate(control: Peer, token_file: Path, tmp_path: Path) -> None:
    accepted = tmp_path / "tokens"
    accepted.write_text("one\ntwo\n")
    accepted.chmod(0o600)
    client = Job(control, "m")
    with serve("memory", 0, "--auth-token-file", str(accepted)) as (_, address):
        for token, is_good in (("three", False), ("two", True), ("four", False), ("one", True), ("", False)):
            token_file.write_text(token)
            control.call("connect", address=address)
            if is_good:
                assert client.create("v")["state"] == "STAGING"
                # The stubs' channel carries no token.
                refused("UNAUTHENTICATED", client.raw, "GetWeightVersion", uid=client.uid("v"))
            else:
                refused("UNAUTHENTICATED", client.get, "v")
            assert control.call("health", service="model_express.refit.RefitService") == 1


def until_it_answers(client: Job, name: str) -> dict[str, Any]:
    """The record, once gRPC has dialled again: it waits a second or so after a failure."""
    end = time.monotonic() + 20
    while True:
        try:
            return client.get(name)
        except Raised as error:
            if error.code != "UNAVAILABLE" or time.monotonic() > end:
                raise
            time.sleep(0.05)
