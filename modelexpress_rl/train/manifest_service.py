"""The endpoint inside a trainer process that answers for its manifests and their digests."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpclib import GRPCError, Status

from modelexpress_rl._pb import modelexpress_rl_grpc, refit_grpc
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.column_blocks import COLUMN_BLOCKS_HEADER
from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard import manifest_columns
from modelexpress_rl.reshard.grid import GRID, Selection
from modelexpress_rl.rpc.endpoint import ACCEPT_MANIFEST_HEADER
from modelexpress_rl.rpc.network import GRPC, Network
from modelexpress_rl.topology import TOPOLOGY_HEADER, Topology
from modelexpress_rl.train.adapter import TileDigests, WeightVersionShardManifest
from modelexpress_rl.train.security import Gate, WorkerSecurity

if TYPE_CHECKING:
    import grpclib.server

_log = logging.getLogger(__name__)

PORT_VARIABLE = "MX_WORKER_GRPC_PORT"
DIGEST_TIMEOUT_S = 120.0
_OPEN = WorkerSecurity()
_NOWHERE = Topology()


@dataclass(frozen=True, slots=True)
class ServedShard:
    """What is answered for one version and slot."""

    manifest: WeightVersionShardManifest
    digests: TileDigests | None = None


class ManifestService:
    """Serves the manifests of one client; one server, one port of its own.

    `advertised_host` is what readers dial. `port` 0 lets the kernel choose. `security` says what they
    have to show, `topology` what is told them of where this process runs.
    """

    def __init__(
        self,
        advertised_host: str,
        *,
        port: int = 0,
        network: Network = GRPC,
        security: WorkerSecurity = _OPEN,
        topology: Topology = _NOWHERE,
    ) -> None:
        self.reader_columns: Callable[[str], None] = _ignore
        """Told what each reader declares of the columns that it wants."""
        self._host = advertised_host
        self._served: dict[tuple[str, str], ServedShard] = {}
        manifests = _Manifests(self._served, security.gate, topology)
        services = (manifests, _Digests(self._served, security.gate, lambda text: self.reader_columns(text)))
        # A loopback address is meant for this host only; any other may stand for any interface.
        self._server = network.endpoint_server(
            services, host=_interface(advertised_host), port=port, **_demands(security)
        )
        self._port = port
        self._scheme = "" if security.ssl_context is None else "https://"

    @property
    def endpoint(self) -> str:
        """`host:port`, once started; with `https://` before it where readers need TLS."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}{host}:{self._server.port}"

    async def start(self) -> None:
        """Begin to serve.

        Raises:
            UsageError: the configured port is taken; the message names it and its variable.
        """
        try:
            await self._server.start()
        except UsageError as error:
            if self._port:
                raise UsageError(f"{PORT_VARIABLE}={self._port}: {error}") from error
            raise

    def serve(self, version_id: str, slot_id: str, shard: ServedShard) -> None:
        """Answer for this version and slot from now on; the same again is harmless."""
        self._served[version_id, slot_id] = shard

    def stop(self, version_id: str, slot_id: str) -> None:
        """Answer NOT_FOUND from now on; unknown ones are harmless."""
        self._served.pop((version_id, slot_id), None)

    @property
    def served(self) -> Mapping[tuple[str, str], ServedShard]:
        """What is served now, by version and slot."""
        return self._served

    async def aclose(self) -> None:
        """Stop serving, bounded; idempotent."""
        self._served.clear()
        await self._server.aclose()


class _Manifests(refit_grpc.RefitWorkerServiceBase):
    def __init__(self, served: Mapping[tuple[str, str], ServedShard], gate: Gate, topology: Topology) -> None:
        self._served = served
        self._gate = gate
        self._headers = {TOPOLOGY_HEADER: str(topology)} if topology.labels else None

    async def GetWeightVersionShardManifest(  # noqa: N802 (the wire's name)
        self,
        stream: grpclib.server.Stream[
            refit.GetWeightVersionShardManifestRequest, refit.GetWeightVersionShardManifestResponse
        ],
    ) -> None:
        request = await stream.recv_message()
        assert request is not None
        await self._gate.admit(request.version_id, stream.metadata or {})
        manifest = _find(self._served, request.version_id, request.source_slot_id).manifest
        if self._headers is not None:
            await stream.send_initial_metadata(metadata=self._headers)
        data = manifest.data
        if manifest.columns is not None and manifest_columns.NAME in _accepted(stream.metadata or {}):
            data = manifest.columns
        # In any encoding it is the manifest whose version 1 has this digest.
        await stream.send_message(
            refit.GetWeightVersionShardManifestResponse(manifest=data, manifest_digest=manifest.digest)
        )


class _Digests(modelexpress_rl_grpc.RefitWorkerDigestServiceBase):
    def __init__(
        self, served: Mapping[tuple[str, str], ServedShard], gate: Gate, hear: Callable[[str], None]
    ) -> None:
        self._served = served
        self._gate = gate
        self._hear = hear

    async def GetShardDigests(  # noqa: N802 (the wire's name)
        self, stream: grpclib.server.Stream[v1.GetShardDigestsRequest, v1.GetShardDigestsResponse]
    ) -> None:
        request = await stream.recv_message()
        assert request is not None
        await self._gate.admit(request.version_id, stream.metadata or {})
        shard = _find(self._served, request.version_id, request.source_slot_id)
        self._hear(_header(stream.metadata or {}, COLUMN_BLOCKS_HEADER))
        if shard.digests is None:
            raise GRPCError(Status.NOT_FOUND, "the shard was published without digests")
        try:
            async with asyncio.timeout(DIGEST_TIMEOUT_S):
                table = await _digests(shard.digests, request)
        except TimeoutError as error:
            raise GRPCError(
                Status.DEADLINE_EXCEEDED, f"digests not made within {DIGEST_TIMEOUT_S:g} s"
            ) from error
        except UsageError as error:
            raise GRPCError(Status.INVALID_ARGUMENT, str(error)) from error
        except Exception as error:
            _log.exception("digests of version %s", request.version_id)
            raise GRPCError(Status.INTERNAL, f"the digests could not be made: {error}") from error
        await stream.send_message(
            v1.GetShardDigestsResponse(digests=table, sha256=hashlib.sha256(table).hexdigest())
        )


def _ignore(_: str) -> None:
    pass


def _accepted(metadata: Mapping[str, object]) -> list[str]:
    """Which encodings of a manifest a caller takes beside version 1."""
    return [name.strip() for name in _header(metadata, ACCEPT_MANIFEST_HEADER).split(",")]


def _header(metadata: Mapping[str, object], name: str) -> str:
    return str(metadata.get(name, ""))


async def _digests(digests: TileDigests, request: v1.GetShardDigestsRequest) -> bytes:
    """What was asked for, encoded.

    Raises:
        UsageError: the selection is not of this manifest, or of a grid that is not known.
    """
    if not request.HasField("selection"):
        return await digests.table()
    wanted = request.selection
    if wanted.grid != GRID:
        raise UsageError(f"grid {wanted.grid} is not known here; expected {GRID}")
    bitmaps = [wanted.slabs, wanted.bands, wanted.tiles, wanted.groups]
    selection = Selection.of_bitmaps(wanted.first_row, wanted.row_count, bitmaps, digests.rows)
    return await digests.answer(selection)


def _find(served: Mapping[tuple[str, str], ServedShard], version_id: str, slot_id: str) -> ServedShard:
    shard = served.get((version_id, slot_id))
    if shard is None:
        raise GRPCError(Status.NOT_FOUND, f"version {version_id!r} in slot {slot_id!r} is not published here")
    return shard


def _demands(security: WorkerSecurity) -> dict[str, Any]:
    """Only what is demanded, so that an endpoint that knows of none can stand in."""
    given = {"ssl_context": security.ssl_context, "tokens": security.tokens}
    return {name: value for name, value in given.items() if value is not None}


def _interface(advertised_host: str) -> str | None:
    if advertised_host in ("127.0.0.1", "::1"):
        return advertised_host
    return "127.0.0.1" if advertised_host == "localhost" else None
