"""What a generator client is made of, opened and closed together."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Self

from modelexpress_rl import envs
from modelexpress_rl.background import Background
from modelexpress_rl.clock import Clock
from modelexpress_rl.inference.config import GeneratorSettings
from modelexpress_rl.inference.installation import Installation
from modelexpress_rl.inference.nearness import Nearness
from modelexpress_rl.inference.planning import Planning
from modelexpress_rl.inference.reads import ReadCache
from modelexpress_rl.inference.session import GeneratorSession
from modelexpress_rl.inference.sources import SourceFetcher
from modelexpress_rl.inference.staging import StagingPool
from modelexpress_rl.reshard.cost import load_cost
from modelexpress_rl.rpc import ControlPlane, TokenFile, parse_addresses
from modelexpress_rl.rpc.network import GRPC, Network
from modelexpress_rl.transport.port import Agent


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorParts:
    """Everything behind one client."""

    settings: GeneratorSettings
    clock: Clock
    background: Background
    session: GeneratorSession
    agent: Agent
    pool: StagingPool
    cache: ReadCache
    fetcher: SourceFetcher
    planning: Planning
    installation: Installation
    closing: contextlib.AsyncExitStack

    @classmethod
    async def open(
        cls, settings: GeneratorSettings, agent: Agent | None, clock: Clock, network: Network = GRPC
    ) -> Self:
        """Open all of it; a failure on the way closes what was opened.

        Raises:
            UsageError: the engine can't take its weights as asked for.
            RpcError: the control plane refuses, or can't be reached.
        """
        owner = f"generator {settings.worker_id}"
        async with contextlib.AsyncExitStack() as stack:
            planning = Planning(
                settings.engine_context.create_adapter(),
                owner,
                Nearness(settings.topology),
                load_cost(),
            )
            control = await stack.enter_async_context(_control_plane(settings, network))
            if agent is None:
                agent = await _nixl_agent(f"{owner.replace(' ', '-')}")
                stack.push_async_callback(agent.aclose)
            background = await Background.start(owner)
            stack.push_async_callback(background.aclose)
            pool = StagingPool(agent, background)
            stack.push_async_callback(pool.aclose)
            fetcher = SourceFetcher(
                rpc_timeout_s=settings.rpc_timeout_s, worker_id=settings.worker_id, network=network
            )
            stack.push_async_callback(fetcher.aclose)
            session = GeneratorSession(
                control,
                background,
                worker_id=settings.worker_id,
                model_name=settings.model_name,
                registration_ttl_s=settings.registration_ttl_s,
                lease_ttl_s=settings.lease_ttl_s,
                clock=clock,
            )
            await session.open()
            stack.push_async_callback(session.aclose)
            if settings.initial_serving_version_id is not None:
                session.report_serving(settings.initial_serving_version_id, uncertain=False)
            return cls(
                settings=settings,
                clock=clock,
                background=background,
                session=session,
                agent=agent,
                pool=pool,
                cache=ReadCache(agent),
                fetcher=fetcher,
                planning=planning,
                installation=Installation(session, pool, clock, settings.initial_serving_version_id),
                closing=stack.pop_all(),
            )
        raise AssertionError("unreachable")

    async def aclose(self) -> None:
        """Close all of it, the last opened first."""
        await self.closing.aclose()


def _control_plane(settings: GeneratorSettings, network: Network) -> ControlPlane:
    token_path = envs.auth_token_path()
    return network.control_plane(
        parse_addresses(settings.server_url, what=settings.server_url_name),
        rpc_timeout_s=settings.rpc_timeout_s,
        credentials=None if token_path is None else TokenFile(token_path),
    )


async def _nixl_agent(name: str) -> Agent:
    from modelexpress_rl.transport.nixl import NixlAgent

    return await NixlAgent.create(name, readable=False)
