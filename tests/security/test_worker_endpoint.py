"""The manifest endpoint of a trainer: TLS, certificates, tokens, and a live lease, with real clients."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest
from grpclib import GRPCError, Status

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl._pb import refit_pb2_grpc
from modelexpress_rl.errors import AccessDenied, UsageError
from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.rpc import (
    ControlPlane,
    NotFound,
    PermissionDenied,
    TlsError,
    Unauthenticated,
    Unavailable,
    WorkerEndpoint,
    parse_address,
)
from modelexpress_rl.rpc.auth import worker_token
from modelexpress_rl.rpc.endpoint import LEASE_ID_HEADER, WORKER_ID_HEADER
from modelexpress_rl.server.security import ServerSecurity
from modelexpress_rl.train import security as train_security
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient
from modelexpress_rl.train.security import BELIEVED_MS, CONCURRENT_CHECKS, LeaseGate
from tests.security.authority import Authority
from tests.security.job import SLOT, Job, opened
from tests.server.api import eventually
from tests.train.support import ScriptedControl, VirtualClock, failure

pytestmark = pytest.mark.anyio

MANIFEST = refit.GetWeightVersionShardManifestRequest(version_id="v1", source_slot_id=SLOT)
DIGESTS = v1.GetShardDigestsRequest(version_id="v1", source_slot_id=SLOT)


@pytest.fixture(autouse=True)
def _this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")


@pytest.fixture
async def job() -> AsyncIterator[Job]:
    async with opened() as made:
        yield made


def environment(monkeypatch: pytest.MonkeyPatch, **paths: Path | str) -> None:
    for name, value in paths.items():
        monkeypatch.setenv(name, str(value))


def endpoint_of(trainer: AsyncModelExpressTrainerClient, **named: object) -> WorkerEndpoint:
    return WorkerEndpoint(parse_address(trainer.worker_endpoint), rpc_timeout_s=5.0, **named)  # type: ignore[arg-type]


class TestTls:
    async def test_a_whole_job_under_mutual_tls_and_tokens(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Everything at once: control plane and manifests, certificates both ways, tokens both ways."""
        authority = Authority(tmp_path)
        cert, key = authority.issue("everyone")
        (tmp_path / "token").write_text("control-secret")
        (tmp_path / "worker-tokens").write_text("reader-secret\nolder-secret")
        environment(
            monkeypatch,
            MX_TLS_CA=authority.file,
            MX_TLS_CERT=cert,
            MX_TLS_KEY=key,
            MX_WORKER_TLS_CERT=cert,
            MX_WORKER_TLS_KEY=key,
            MX_WORKER_TLS_CLIENT_CA=authority.file,
            MX_AUTH_TOKEN_PATH=tmp_path / "token",
            MX_WORKER_AUTH_TOKEN_PATH=tmp_path / "worker-tokens",
            MX_MANIFEST_REQUIRE_LEASE="1",
        )
        security = ServerSecurity.of(
            cert=cert, key=key, client_ca=authority.file, token_file=tmp_path / "token"
        )
        async with opened(security, scheme="https") as job:
            trainer = await job.trainer()
            assert trainer.worker_endpoint.startswith("https://127.0.0.1:")
            for number in (1, 2):
                await job.publish(trainer, f"v{number}", float(number))
                await job.refit(f"v{number}", float(number))

    async def test_a_reader_that_does_not_trust_it(
        self, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        authority = Authority(tmp_path)
        cert, key = authority.issue("trainer", ["trainers.example"])
        environment(monkeypatch, MX_WORKER_TLS_CERT=cert, MX_WORKER_TLS_KEY=key)
        trainer = await job.trainer()
        await job.publish(trainer, "v1", 1.0)
        generator, _ = await job.generator()
        with pytest.raises(AccessDenied, match=r"worker .*: TLS: its certificate is not trusted .*MX_TLS_CA"):
            await generator.stage_weight("v1")
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        other, _ = await job.generator()
        with pytest.raises(AccessDenied, match=r"is not for '127\.0\.0\.1'.*MX_TLS_WORKER_NAME"):
            await other.stage_weight("v1")
        monkeypatch.setenv("MX_TLS_WORKER_NAME", "trainers.example")
        await job.refit("v1", 1.0)

    async def test_both_stacks_with_and_without_a_certificate(
        self, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        authority = Authority(tmp_path)
        cert, key = authority.issue("trainer")
        ours = authority.issue("reader")
        environment(
            monkeypatch,
            MX_WORKER_TLS_CERT=cert,
            MX_WORKER_TLS_KEY=key,
            MX_WORKER_TLS_CLIENT_CA=authority.file,
            MX_TLS_CA=authority.file,
        )
        trainer = await job.trainer()
        await job.publish(trainer, "v1", 1.0)
        async with endpoint_of(trainer) as endpoint:
            with pytest.raises(Unavailable, match=r"demands? a client certificate"):
                await endpoint.get_weight_version_shard_manifest(MANIFEST)
        for pair in (None, ours):
            key_pem, cert_pem = (None, None) if pair is None else (read(pair[1]), read(pair[0]))
            credentials = grpc.ssl_channel_credentials(read(authority.file), key_pem, cert_pem)
            target = trainer.worker_endpoint.removeprefix("https://")
            async with grpc.aio.secure_channel(target, credentials) as channel:
                stub = refit_pb2_grpc.RefitWorkerServiceStub(channel)
                call = stub.GetWeightVersionShardManifest(MANIFEST)
                if pair is None:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                else:
                    assert (await call).manifest
        environment(monkeypatch, MX_TLS_CERT=ours[0], MX_TLS_KEY=ours[1])
        async with endpoint_of(trainer) as endpoint:
            assert (await endpoint.get_weight_version_shard_manifest(MANIFEST)).manifest

    async def test_its_certificate_rotates(
        self, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        authority = Authority(tmp_path)
        cert, key = authority.issue("trainer", age_days=3)
        environment(monkeypatch, MX_WORKER_TLS_CERT=cert, MX_WORKER_TLS_KEY=key, MX_TLS_CA=authority.file)
        trainer = await job.trainer()
        await job.publish(trainer, "v1", 1.0)
        async with endpoint_of(trainer) as endpoint:
            with pytest.raises(TlsError, match="its certificate has expired"):
                await endpoint.get_weight_version_shard_manifest(MANIFEST)
            authority.issue("trainer")
            assert (await endpoint.get_weight_version_shard_manifest(MANIFEST)).manifest

    async def test_files_that_can_not_be_used(
        self, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MX_WORKER_TLS_CLIENT_CA", str(tmp_path / "nowhere"))
        with pytest.raises(UsageError, match="needs MX_WORKER_TLS_CERT and MX_WORKER_TLS_KEY"):
            await job.trainer()
        monkeypatch.delenv("MX_WORKER_TLS_CLIENT_CA")
        monkeypatch.setenv("MX_WORKER_AUTH_TOKEN_PATH", str(tmp_path / "nowhere"))
        with pytest.raises(UsageError, match=r"MX_WORKER_AUTH_TOKEN_PATH=.*nowhere"):
            await job.trainer()


class TestTokens:
    async def test_who_gets_a_manifest(
        self, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "worker-tokens"
        write(path, "reader-secret\nolder-secret\n")
        monkeypatch.setenv("MX_WORKER_AUTH_TOKEN_PATH", str(path))
        trainer = await job.trainer()
        await job.publish(trainer, "v1", 1.0)
        await job.refit("v1", 1.0)
        for name, text in (("older", "older-secret"), ("newer", "# newest first\nreader-secret\nother")):
            write(tmp_path / name, text)
            async with endpoint_of(trainer, credentials=worker_token(tmp_path / name)) as endpoint:
                assert (await endpoint.get_weight_version_shard_manifest(MANIFEST)).manifest
        async with endpoint_of(trainer) as endpoint:
            for call, request in (
                (endpoint.get_weight_version_shard_manifest, MANIFEST),
                (endpoint.get_shard_digests, DIGESTS),
            ):
                with pytest.raises(Unauthenticated, match="a bearer token is required: none came"):
                    await call(request)  # type: ignore[operator]
        monkeypatch.delenv("MX_WORKER_AUTH_TOKEN_PATH")
        generator, _ = await job.generator()
        with pytest.raises(AccessDenied, match=r"version v1: worker .*a bearer token is required"):
            await generator.stage_weight("v1")

    async def test_it_rotates_under_a_reader(
        self, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "worker-tokens"
        write(path, "first-secret")
        monkeypatch.setenv("MX_WORKER_AUTH_TOKEN_PATH", str(path))
        trainer = await job.trainer()
        await job.publish(trainer, "v1", 1.0)
        own = tmp_path / "own"
        write(own, "first-secret")
        async with endpoint_of(trainer, credentials=worker_token(own)) as endpoint:
            await endpoint.get_weight_version_shard_manifest(MANIFEST)
            write(path, "second-secret")
            write(own, "second-secret")

            async def works() -> bool:
                try:
                    await endpoint.get_weight_version_shard_manifest(MANIFEST)
                except Unauthenticated:
                    return False
                async with endpoint_of(trainer) as nobody:
                    with pytest.raises(Unauthenticated):
                        await nobody.get_weight_version_shard_manifest(MANIFEST)
                return True

            await eventually(works)


def headers(worker_id: str, lease_id: str) -> dict[str, str | bytes]:
    return {WORKER_ID_HEADER: worker_id.encode(), LEASE_ID_HEADER: lease_id.encode()}


class TestLeases:
    @pytest.fixture
    async def trainer(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> AsyncModelExpressTrainerClient:
        monkeypatch.setenv("MX_MANIFEST_REQUIRE_LEASE", "1")
        trainer = await job.trainer()
        await job.publish(trainer, "v1", 1.0)
        return trainer

    async def test_our_generator_has_one(self, job: Job, trainer: AsyncModelExpressTrainerClient) -> None:
        await job.refit("v1", 1.0)
        await job.refit("v1", 1.0, worker_id="Bärbel:7 /x")
        await job.publish(trainer, "v2", 2.0)
        await job.refit("v2", 2.0)

    async def test_a_reader_of_0_7_is_told_why(
        self, job: Job, trainer: AsyncModelExpressTrainerClient
    ) -> None:
        async with grpc.aio.insecure_channel(trainer.worker_endpoint) as channel:
            stub = refit_pb2_grpc.RefitWorkerServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetWeightVersionShardManifest(MANIFEST)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        for words in ("MX_MANIFEST_REQUIRE_LEASE", "the call names none", "readers of 0.7"):
            assert words in (caught.value.details() or "")

    async def test_a_lease_that_is_not_live(self, job: Job, trainer: AsyncModelExpressTrainerClient) -> None:
        held = await job.lease("g", "v1")
        async with endpoint_of(trainer) as endpoint:

            async def ask(worker_id: str, lease_id: str, version: str = "v1") -> None:
                request = refit.GetWeightVersionShardManifestRequest(version_id=version, source_slot_id=SLOT)
                lease = headers(worker_id, lease_id)
                assert (await endpoint.get_weight_version_shard_manifest(request, metadata=lease)).manifest

            await ask("g", held)
            for worker_id, lease_id in (("h", held), ("g", "00000000"), ("g", ""), ("", held)):
                with pytest.raises(PermissionDenied, match="live lease"):
                    await ask(worker_id, lease_id)
            with pytest.raises(PermissionDenied, match="live lease"):
                await endpoint.get_shard_digests(DIGESTS, metadata=headers("h", held))
            with pytest.raises(PermissionDenied, match="version other is not known"):
                await ask("g", held, "other")
            await job.publish(trainer, "v2", 2.0)
            with pytest.raises(PermissionDenied, match="on version v2 is not live"):
                await ask("g", held, "v2")

    async def test_it_is_believed_for_a_few_seconds_only(
        self, job: Job, trainer: AsyncModelExpressTrainerClient
    ) -> None:
        clock = VirtualClock()
        held, short = await job.lease("g", "v1"), await job.lease("h", "v1", ttl_s=2)
        async with ControlPlane.dial(job.url) as control:
            gate = LeaseGate(control, clock=clock)
            await gate.admit("v1", headers("g", held))
            await job.give_back(held, "g", "v1")
            await clock.advance(BELIEVED_MS - 1_000)
            await gate.admit("v1", headers("g", held))
            assert not gate._knows("v1", (short, "h"))  # its own end comes sooner
            await clock.advance(1_000)
            with pytest.raises(GRPCError, match="not live"):
                await gate.admit("v1", headers("g", held))

    async def test_many_readers_cost_few_questions(
        self, job: Job, trainer: AsyncModelExpressTrainerClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []
        call = trainer._control.call

        async def counted(method: Any, *rest: Any) -> Any:
            asked.append(method.name)
            return await call(method, *rest)

        monkeypatch.setattr(trainer._control, "call", counted)
        leases = [(reader, await job.lease(reader, "v1")) for reader in (f"r{n}" for n in range(40))]
        async with endpoint_of(trainer) as endpoint, anyio.create_task_group() as group:

            async def read_it(reader: str, lease_id: str) -> None:
                await endpoint.get_weight_version_shard_manifest(MANIFEST, metadata=headers(reader, lease_id))
                await endpoint.get_shard_digests(DIGESTS, metadata=headers(reader, lease_id))

            for reader, lease_id in leases:
                group.start_soon(read_it, reader, lease_id)
        assert 1 <= asked.count("CheckLease") <= CONCURRENT_CHECKS

    async def test_a_lease_named_as_0_7_does_is_asked_about(
        self, job: Job, trainer: AsyncModelExpressTrainerClient
    ) -> None:
        by_id = (await job.lease("g", "v1")).partition(".")[0]
        async with ControlPlane.dial(job.url) as control:
            gate = LeaseGate(control)
            await gate.admit("v1", headers("g", by_id))
            await job.give_back(by_id, "g", "v1")
            with pytest.raises(GRPCError, match="not live"):
                await gate.admit("v1", headers("g", by_id))

    async def test_what_is_remembered_is_bounded(
        self, job: Job, trainer: AsyncModelExpressTrainerClient
    ) -> None:
        async with ControlPlane.dial(job.url) as control:
            gate = LeaseGate(control)
            for number in range(20):
                await job.publish(trainer, f"w{number}", 1.0)
                await gate.admit(f"w{number}", headers("g", await job.lease("g", f"w{number}")))
            assert len(gate._live) == 16

    async def test_an_old_or_absent_control_plane(self) -> None:
        def unknown(request: object) -> object:
            raise failure(grpc.StatusCode.UNIMPLEMENTED, "CheckLease")

        for control, status, words in (
            (ScriptedControl(CheckLease=unknown), Status.PERMISSION_DENIED, "can't be asked about leases"),
            (ScriptedControl(), Status.UNAVAILABLE, "can't be checked now: UNAVAILABLE"),
        ):
            gate = LeaseGate(control)
            with pytest.raises(GRPCError) as caught:
                await gate.admit("v", headers("g", "00000000"))
            assert caught.value.status is status
            assert words in (caught.value.message or "")


class TestOpenEndpoints:
    async def test_a_worker_that_others_can_read_says_so_once(
        self, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(train_security, "_told", False)
        with caplog.at_level(logging.WARNING):
            await (await job.trainer()).close()
            assert "may read the published weights" not in caplog.text
            monkeypatch.setenv("MX_WORKER_HOST", "10.9.8.7")
            for _ in range(2):
                await (await job.trainer()).close()
        assert caplog.text.count("whoever reaches 10.9.8.7 may read the published weights") == 1

    async def test_the_nixl_listener_is_not_started_where_readers_must_prove_something(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert not train_security.readers_must_prove()
        for name in ("MX_WORKER_AUTH_TOKEN_PATH", "MX_WORKER_TLS_CLIENT_CA", "MX_MANIFEST_REQUIRE_LEASE"):
            with monkeypatch.context() as patch:
                patch.setenv(name, "1")
                assert train_security.readers_must_prove()

    async def test_what_is_not_published_is_not_found(self, job: Job) -> None:
        trainer = await job.trainer()
        async with endpoint_of(trainer) as endpoint:
            with pytest.raises(NotFound):
                await endpoint.get_weight_version_shard_manifest(MANIFEST)


def read(path: Path) -> bytes:
    return path.read_bytes()


def write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.heavy
async def test_a_job_over_nixl_where_everything_is_demanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL's own listener, which asks nobody for anything, is not there; nothing needs it."""
    pytest.importorskip("nixl")
    authority = Authority(tmp_path)
    cert, key = authority.issue("trainer")
    write(tmp_path / "tokens", "reader-secret")
    environment(
        monkeypatch,
        MX_TLS_CA=authority.file,
        MX_WORKER_TLS_CERT=cert,
        MX_WORKER_TLS_KEY=key,
        MX_WORKER_AUTH_TOKEN_PATH=tmp_path / "tokens",
        MX_MANIFEST_REQUIRE_LEASE="1",
    )
    async with opened(nixl=True) as job:
        trainer = await job.trainer()
        await job.publish(trainer, "v1", 1.0)
        lease = headers("g", await job.lease("g", "v1"))
        token = worker_token(tmp_path / "tokens")
        async with endpoint_of(trainer, credentials=token) as endpoint:
            answer = await endpoint.get_weight_version_shard_manifest(MANIFEST, metadata=lease)
        assert manifests.decode(answer.manifest).metadata_endpoint == ""
        await job.refit("v1", 1.0)
