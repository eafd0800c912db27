"""Peers and prepared reads, kept from version to version: a warm refit only posts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from modelexpress_rl.errors import ManifestError
from modelexpress_rl.inference.planning import Chunk
from modelexpress_rl.inference.recent import Recent
from modelexpress_rl.inference.staging import Arena
from modelexpress_rl.reshard.manifest import Manifest
from modelexpress_rl.reshard.plan import Plan
from modelexpress_rl.transport.port import Agent, PreparedRead, ReadList


@dataclass(frozen=True, slots=True)
class _Peer:
    """A loaded peer; another `generation` of it invalidates what was prepared before."""

    name: str
    metadata_sha256: bytes
    generation: int


class ReadCache:
    """Loads each peer once per metadata, and prepares each read once per peer, arena and runs.

    Peers are loaded one after the other: transports have crashed when one was loaded twice at once.
    """

    def __init__(self, agent: Agent) -> None:
        self.prepared_reads = 0
        self._agent = agent
        self._peers: dict[str, _Peer] = {}
        self._generations = 0
        self._prepared: Recent[tuple[str, int, int, bytes], PreparedRead] = Recent()

    async def prepared(self, chunk: Chunk, plan: Plan, manifest: Manifest, arena: Arena) -> PreparedRead:
        """The read of one chunk into `arena`.

        Raises:
            ManifestError, PeerError: the manifest's transport metadata can't be loaded.
            TransferError: a run lies outside what the peer has registered.
        """
        peer = await self._load(manifest)
        key = (peer.name, peer.generation, arena.addr, chunk.runs_key)
        prepared = self._prepared.get(key)
        if prepared is None:
            runs = plan.runs(chunk.rows)
            reads = ReadList(
                remote_addr=runs.remote_addr,
                local_addr=runs.local_offset + np.uint64(arena.addr),
                size_bytes=runs.size_bytes,
            )
            prepared = await self._agent.prepare(peer.name, reads)
            self._prepared.put(key, prepared)
            self.prepared_reads += 1
        return prepared

    async def forget(self, agent_name: str) -> None:
        """Load this peer anew at its next use: a read from it failed, its descriptors may be stale."""
        peer = self._peers.pop(agent_name, None)
        if peer is not None:
            for key in [key for key in self._prepared if key[:2] == (peer.name, peer.generation)]:
                self._prepared.discard(key)
            await self._agent.forget_peer(peer.name)

    def end_turn(self) -> None:
        """A pull ended: what has not been used for long is dropped."""
        self._prepared.end_turn()

    async def _load(self, manifest: Manifest) -> _Peer:
        sha256 = hashlib.sha256(manifest.agent_meta).digest()
        known = self._peers.get(manifest.agent_name)
        if known is not None and known.metadata_sha256 == sha256:
            return known
        name = await self._agent.add_peer(manifest.agent_meta)
        if name != manifest.agent_name:
            await self._agent.forget_peer(name)
            raise ManifestError(
                f"the manifest of agent {manifest.agent_name!r} carries the metadata of agent {name!r}"
            )
        self._generations += 1
        self._peers[name] = _Peer(name, sha256, self._generations)
        return self._peers[name]
