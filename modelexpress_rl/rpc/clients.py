"""The clients: `ControlPlane` for the central server, `WorkerEndpoint` for a trainer's process.

Every RPC is an async method that takes its request message and `timeout_s` (a stream: `silence_s`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self, TypeVar

from google.protobuf.message import Message

from modelexpress_rl import arguments, envs
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import UsageError
from modelexpress_rl.rpc import tls
from modelexpress_rl.rpc.address import Address, parse_addresses
from modelexpress_rl.rpc.auth import TokenFile
from modelexpress_rl.rpc.channel import Client, Metadata
from modelexpress_rl.rpc.methods import ServerStream, Unary
from modelexpress_rl.rpc.replicas import Replicas
from modelexpress_rl.topology import TOPOLOGY_HEADER, Topology

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)

REFIT_SERVICE = "model_express.refit.RefitService"
WORKER_SERVICE = "model_express.refit.RefitWorkerService"
CONTROL_SERVICE = "modelexpress_rl.v1.RefitControlService"
DIGEST_SERVICE = "modelexpress_rl.v1.RefitWorkerDigestService"


class ControlPlane(Client):
    """RefitService, which every server has, and RefitControlService, which an older one answers with
    `Unimplemented`.

    Where the address names several servers, each call goes to one of them, and elsewhere when that fails.
    """

    def __init__(self, address: Address, **options: Any) -> None:
        super().__init__(address, **options)
        self._replicas: Replicas | None = None
        if address.others:
            each = (replace(address, others=()), *address.others)
            self._replicas = Replicas([ControlPlane(one, **options) for one in each])

    async def call(
        self, method: Unary[Q, A], request: Q, timeout_s: float | None, metadata: Metadata | None = None
    ) -> A:
        """One unary call; see `Unary`."""
        if self._replicas is None:
            return await super().call(method, request, timeout_s, metadata)
        timeout_s = self.rpc_timeout_s if timeout_s is None else timeout_s
        return await self._replicas.call(method, request, timeout_s, metadata)

    @asynccontextmanager
    async def stream(
        self, method: ServerStream[Q, A], request: Q, silence_s: float
    ) -> AsyncGenerator[AsyncIterator[A], None]:
        """One server-streaming call; see `ServerStream`."""
        streamed = super().stream if self._replicas is None else self._replicas.stream
        async with streamed(method, request, silence_s) as messages:
            yield messages

    async def aclose(self) -> None:
        """Closes every connection; idempotent."""
        await super().aclose()
        if self._replicas is not None:
            await self._replicas.aclose()

    @classmethod
    def dial(cls, server_url: str | None = None, *, rpc_timeout_s: float = 30.0) -> Self:
        """A client of the server that is named here or by the environment, with its token.

        Nothing is connected before the first call.

        Raises:
            UsageError: the address can't be read; the message names where it came from. Or the timeout is
                no positive number: with NaN a call would never end.
        """
        rpc_timeout_s = arguments.seconds("rpc_timeout_s", rpc_timeout_s)
        text, what = (server_url, "server_url") if server_url else (envs.server_url(), envs.server_url_name())
        token_path = envs.auth_token_path()
        return cls(
            parse_addresses(text, what=what),
            rpc_timeout_s=rpc_timeout_s,
            credentials=TokenFile(token_path) if token_path else None,
        )

    def _expected_name(self) -> str | None:
        if not self.address.secure and self.address.scheme is None:
            tls.require_none(str(self.address))
        return envs.tls_server_name()

    create_weight_version = Unary(
        REFIT_SERVICE,
        "CreateWeightVersion",
        refit.CreateWeightVersionRequest,
        refit.CreateWeightVersionResponse,
    )
    get_weight_version = Unary(
        REFIT_SERVICE, "GetWeightVersion", refit.GetWeightVersionRequest, refit.GetWeightVersionResponse
    )
    delete_weight_version = Unary(
        REFIT_SERVICE,
        "DeleteWeightVersion",
        refit.DeleteWeightVersionRequest,
        refit.DeleteWeightVersionResponse,
    )
    update_weight_version_state = Unary(
        REFIT_SERVICE,
        "UpdateWeightVersionState",
        refit.UpdateWeightVersionStateRequest,
        refit.UpdateWeightVersionStateResponse,
    )
    register_worker = Unary(
        REFIT_SERVICE, "RegisterWorker", refit.RegisterWorkerRequest, refit.RegisterWorkerResponse
    )
    create_weight_version_shard = Unary(
        REFIT_SERVICE,
        "CreateWeightVersionShard",
        refit.CreateWeightVersionShardRequest,
        refit.CreateWeightVersionShardResponse,
    )
    list_weight_version_shards = Unary(
        REFIT_SERVICE,
        "ListWeightVersionShards",
        refit.ListWeightVersionShardsRequest,
        refit.ListWeightVersionShardsResponse,
    )
    delete_weight_version_shard = Unary(
        REFIT_SERVICE,
        "DeleteWeightVersionShard",
        refit.DeleteWeightVersionShardRequest,
        refit.DeleteWeightVersionShardResponse,
    )
    register_version_lease = Unary(
        REFIT_SERVICE,
        "RegisterVersionLease",
        refit.RegisterVersionLeaseRequest,
        refit.RegisterVersionLeaseResponse,
    )
    delete_version_lease = Unary(
        REFIT_SERVICE,
        "DeleteVersionLease",
        refit.DeleteVersionLeaseRequest,
        refit.DeleteVersionLeaseResponse,
    )

    get_server_info = Unary(
        CONTROL_SERVICE, "GetServerInfo", v1.GetServerInfoRequest, v1.GetServerInfoResponse
    )
    watch_version = ServerStream(
        CONTROL_SERVICE, "WatchVersion", v1.WatchVersionRequest, v1.WatchVersionResponse
    )
    watch_model = ServerStream(CONTROL_SERVICE, "WatchModel", v1.WatchModelRequest, v1.WatchModelResponse)
    list_versions = Unary(CONTROL_SERVICE, "ListVersions", v1.ListVersionsRequest, v1.ListVersionsResponse)
    list_workers = Unary(CONTROL_SERVICE, "ListWorkers", v1.ListWorkersRequest, v1.ListWorkersResponse)
    release_version = Unary(
        CONTROL_SERVICE, "ReleaseVersion", v1.ReleaseVersionRequest, v1.ReleaseVersionResponse
    )
    evict_version = Unary(CONTROL_SERVICE, "EvictVersion", v1.EvictVersionRequest, v1.EvictVersionResponse)
    retract_shard = Unary(CONTROL_SERVICE, "RetractShard", v1.RetractShardRequest, v1.RetractShardResponse)
    unregister_worker = Unary(
        CONTROL_SERVICE, "UnregisterWorker", v1.UnregisterWorkerRequest, v1.UnregisterWorkerResponse
    )
    acquire_version_lease = Unary(
        CONTROL_SERVICE, "AcquireVersionLease", v1.AcquireVersionLeaseRequest, v1.VersionLeaseResponse
    )
    renew_version_lease = Unary(
        CONTROL_SERVICE, "RenewVersionLease", v1.RenewVersionLeaseRequest, v1.VersionLeaseResponse
    )
    check_lease = Unary(CONTROL_SERVICE, "CheckLease", v1.CheckLeaseRequest, v1.CheckLeaseResponse)
    report_serving = Unary(
        CONTROL_SERVICE, "ReportServing", v1.ReportServingRequest, v1.ReportServingResponse
    )


class WorkerEndpoint(Client):
    """A trainer process's manifests, and digests where it is one of ours.

    `topology` are the labels that it said it has, once it has handed out a manifest.
    """

    topology = Topology()

    def _note_headers(self, headers: Mapping[str, str | bytes]) -> None:
        told = headers.get(TOPOLOGY_HEADER)
        if isinstance(told, str):
            with contextlib.suppress(UsageError):  # a peer's odd labels make it far, not unreadable
                self.topology = Topology.parse(told)

    def _expected_name(self) -> str | None:
        return envs.tls_worker_name()

    get_weight_version_shard_manifest = Unary(
        WORKER_SERVICE,
        "GetWeightVersionShardManifest",
        refit.GetWeightVersionShardManifestRequest,
        refit.GetWeightVersionShardManifestResponse,
    )
    get_shard_digests = Unary(
        DIGEST_SERVICE, "GetShardDigests", v1.GetShardDigestsRequest, v1.GetShardDigestsResponse
    )
