"""What a trainer needs to be read: its transport agent with the listener, and its manifest service."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

import anyio

from modelexpress_rl import envs
from modelexpress_rl.rpc.network import GRPC, Network
from modelexpress_rl.topology import Topology
from modelexpress_rl.train.manifest_service import ManifestService
from modelexpress_rl.train.security import WorkerSecurity, readers_must_prove
from modelexpress_rl.transport.port import Agent

_log = logging.getLogger(__name__)


class WhereToListen(Protocol):
    """The part of `TrainerSettings` that resources need."""

    @property
    def agent_name(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def grpc_port(self) -> int: ...
    @property
    def device_index(self) -> int | None: ...
    @property
    def topology(self) -> Topology: ...


AgentFactory: TypeAlias = Callable[[WhereToListen], Awaitable[Agent]]
_CLOSE_TIMEOUT_S = 10.0
_OPEN = WorkerSecurity()


async def nixl_agent(where: WhereToListen) -> Agent:
    """A NIXL agent that peers can read from; with its metadata listener only where MX_METADATA_PORT is set.

    No reader needs it, since manifests carry the same metadata: neither ours nor the generator of 0.7. It
    listens on every interface whatever MX_WORKER_HOST says, and loses a descriptor with each connection.
    Nor is it started where readers must prove something first: it hands the same keys to whoever asks.

    Raises:
        UsageError: NIXL isn't installed, or the configured port is taken.
    """
    from modelexpress_rl.transport.nixl import NixlAgent

    device_index = where.device_index or 0
    return await NixlAgent.create(
        where.agent_name,
        host=where.host,
        device_index=device_index,
        listen=bool(envs.metadata_port(device_index)) and not readers_must_prove(),
    )


class TrainerResources:
    """An agent and a manifest service that live together."""

    def __init__(self, agent: Agent, service: ManifestService) -> None:
        self.agent = agent
        self.service = service

    @classmethod
    async def open(
        cls,
        where: WhereToListen,
        create_agent: AgentFactory = nixl_agent,
        network: Network = GRPC,
        security: WorkerSecurity = _OPEN,
    ) -> TrainerResources:
        """Start both; where the second fails the first is closed.

        Raises:
            UsageError: a configured port is taken, or the transport isn't installed.
        """
        service = ManifestService(
            where.host, port=where.grpc_port, network=network, security=security, topology=where.topology
        )
        await service.start()
        security.tell_if_open(where.host)
        try:
            agent = await create_agent(where)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await service.aclose()
            raise
        return cls(agent, service)

    @property
    def endpoint(self) -> str:
        """`host:port` of the manifest service."""
        return self.service.endpoint

    async def aclose(self) -> None:
        """Close both, the second even where the first fails; bounded, shielded, idempotent."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_TIMEOUT_S):
            try:
                await self.agent.aclose()
            finally:
                await self.service.aclose()
