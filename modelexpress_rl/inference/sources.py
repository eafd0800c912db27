"""Manifests and digests of a version's publications: fetched side by side, verified, kept.

A manifest is kept by its sha256, so a version whose manifests are those of the version before costs no
fetch. Digests belong to one version and are fetched for each, while its bytes are read. A publication
that can't be used is dropped where others cover its slot; else its error says which worker, slot and
version it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import anyio.to_thread

from modelexpress_rl import envs
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.column_blocks import COLUMN_BLOCKS_HEADER, ColumnBlocks
from modelexpress_rl.errors import (
    AccessDenied,
    DeadlineExceeded,
    ManifestError,
    ModelExpressError,
    PeerError,
    TransferError,
    TransferTimeout,
    Unavailable,
)
from modelexpress_rl.inference.lease import Publication
from modelexpress_rl.inference.recent import Recent
from modelexpress_rl.inference.tasks import run_under
from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.reshard import manifest_columns
from modelexpress_rl.reshard.digests import DigestTable, decode_digests
from modelexpress_rl.reshard.geometry import Bytes, Source
from modelexpress_rl.reshard.grid import GRID, DigestGrid, Selection
from modelexpress_rl.reshard.hashing import decode_answer, is_answer
from modelexpress_rl.reshard.merge import SourceManifest
from modelexpress_rl.rpc import (
    InvalidArgument,
    NotFound,
    RpcError,
    Unimplemented,
    WorkerEndpoint,
    parse_address,
)
from modelexpress_rl.rpc import errors as rpc_errors
from modelexpress_rl.rpc.auth import worker_token
from modelexpress_rl.rpc.channel import Metadata
from modelexpress_rl.rpc.endpoint import ACCEPT_MANIFEST_HEADER, LEASE_ID_HEADER, WORKER_ID_HEADER
from modelexpress_rl.rpc.network import GRPC, Network
from modelexpress_rl.topology import Topology
from statemachines.ids import VersionId, WorkerId, lease_id_of

_log = logging.getLogger(__name__)

T = TypeVar("T")

CONCURRENT_FETCHES = 32
REPLICA_GRACE_S = 1.0
_NOWHERE = Topology()
_NO_COLUMNS = ColumnBlocks()
_THREAD_BYTES = 64 << 10  # below this, decoding takes less than handing it to a thread


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """One usable publication."""

    publication: Publication
    manifest: SourceManifest
    topology: Topology = _NOWHERE


@dataclass(frozen=True, slots=True, eq=False)
class Digests:
    """Digests of one source: those that were selected, or where `whole` is given, its table of all."""

    digests: Bytes
    whole: DigestTable | None = None


@dataclass(frozen=True, slots=True, eq=False)
class VersionSources:
    """Every usable publication of a version, sorted by (slot, worker); `key` names their manifests."""

    version_id: VersionId
    fetched: tuple[Fetched, ...]
    dropped: Mapping[WorkerId, ModelExpressError] = field(default_factory=dict)

    @property
    def key(self) -> tuple[tuple[str, str, str], ...]:
        """What the plan depends on: the same key means the same addresses, boxes and peers."""
        return tuple(f.publication.identity for f in self.fetched)

    def without(self, workers: frozenset[WorkerId]) -> VersionSources:
        """The same without these workers: they are no longer live."""
        left = tuple(f for f in self.fetched if f.publication.worker_id not in workers)
        return VersionSources(self.version_id, left, self.dropped)

    @property
    def manifests(self) -> list[SourceManifest]:
        """The manifests, in order."""
        return [f.manifest for f in self.fetched]

    def of(self, source: Source) -> Fetched:
        """The publication behind a source."""
        return next(f for f in self.fetched if f.manifest.source == source)


class Departed:
    """Workers that the control plane no longer counts as live, told while their manifests are fetched."""

    def __init__(self) -> None:
        self.workers: frozenset[WorkerId] = frozenset()
        self._waiting: dict[WorkerId, list[anyio.CancelScope]] = {}

    def add(self, workers: frozenset[WorkerId]) -> None:
        """They departed: nothing is fetched of them any more."""
        self.workers |= workers
        for worker_id in workers:
            for scope in self._waiting.get(worker_id, ()):
                scope.cancel()

    @contextlib.contextmanager
    def ends(self, worker_id: WorkerId) -> Iterator[anyio.CancelScope]:
        """A scope that is cancelled when this worker departs."""
        with anyio.CancelScope() as scope:
            if worker_id in self.workers:
                scope.cancel()
            self._waiting.setdefault(worker_id, []).append(scope)
            try:
                yield scope
            finally:
                self._waiting[worker_id].remove(scope)


class SourceFetcher:
    """Fetches from trainer processes; keeps one connection to each, and the manifests last used.

    With `worker_id` it says under which lease it asks: some trainers demand a live one.
    """

    def __init__(
        self,
        *,
        rpc_timeout_s: float,
        worker_id: WorkerId | None = None,
        connect: Callable[[str], WorkerEndpoint] | None = None,
        network: Network = GRPC,
    ) -> None:
        self._rpc_timeout_s = rpc_timeout_s
        self._worker_id = worker_id
        self._connect = connect or self._dial
        self._network = network
        self._endpoints: dict[str, WorkerEndpoint] = {}
        self._manifests: Recent[str, tuple[manifests.Manifest, Topology]] = Recent()
        self._limiter = anyio.CapacityLimiter(CONCURRENT_FETCHES)
        self.fetches = 0

    async def fetch(
        self,
        version_id: VersionId,
        publications: Sequence[Publication],
        deadline: float,
        departed: Departed | None = None,
    ) -> VersionSources:
        """Fetch and check what is not kept; `deadline` is on the clock of `anyio.current_time()`.

        Once every slot has a publication, the other replicas are waited for as long again (at least
        `REPLICA_GRACE_S`): one that is frozen must not hold the stage up. Nor is one that departed.

        Raises:
            ModelExpressError: a slot has no publication that can be used. It is the first such error,
                of its own class: ManifestError (not what was announced), Unavailable, DeadlineExceeded.
        """
        departed = departed or Departed()
        results: list[Fetched | ModelExpressError] = [
            DeadlineExceeded(f"version {version_id}: {publication}: no manifest, and others have it all")
            for publication in publications
        ]
        # What is kept costs no task: a warm version has nothing else.
        for number, publication in enumerate(publications):
            if (kept := self._manifests.get(publication.manifest_digest)) is not None:
                results[number] = _fetched(publication, *kept)
        missing = {publication.slot_id for publication in publications}
        missing -= {result.publication.slot_id for result in results if isinstance(result, Fetched)}
        begun = anyio.current_time()

        async def one(number: int) -> None:
            publication = publications[number]
            with departed.ends(publication.worker_id) as ended:
                results[number] = await self._outcome(
                    lambda: self._fetch_one(version_id, publication, deadline),
                    version_id,
                    publication,
                    deadline,
                )
            if ended.cancelled_caught:
                results[number] = Unavailable(
                    f"version {version_id}: {publication}: no manifest before it was no longer live"
                )
            if isinstance(results[number], Fetched) and publication.slot_id in missing:
                missing.remove(publication.slot_id)
                if not missing:
                    now = anyio.current_time()
                    group.cancel_scope.deadline = now + max(now - begun, REPLICA_GRACE_S)

        async with anyio.create_task_group() as group:
            if not missing:
                group.cancel_scope.deadline = begun + REPLICA_GRACE_S
            for number, result in enumerate(results):
                if not isinstance(result, Fetched):
                    group.start_soon(one, number)
        used = [result for result in results if isinstance(result, Fetched)]
        dropped = {
            publication.worker_id: result
            for publication, result in zip(publications, results, strict=True)
            if isinstance(result, ModelExpressError)
        }
        self._require_every_slot(publications, results)
        for worker_id, error in dropped.items():
            _log.warning(
                "version %s: a replica takes the place of worker %s: %s", version_id, worker_id, error
            )
        self._manifests.end_turn()
        await self._hang_up_on_all_but(publications)
        return VersionSources(version_id, tuple(used), dropped)

    async def digests(
        self,
        version_id: VersionId,
        fetched: Fetched,
        ask: Selection,
        grid: DigestGrid,
        deadline: float,
        columns: ColumnBlocks = _NO_COLUMNS,
        stall_timeout_s: float | None = None,
    ) -> Digests | ModelExpressError | None:
        """Fetch the digests of one selection; None where the publisher made none.

        The publisher is told of which tensors this reader wants `columns`. To hash may take it long: after
        `stall_timeout_s` it is asked whether it is there at all, and has failed where it does not answer
        that. A failure is returned, not raised: it says which worker, slot and version it was about.
        """

        async def fetch() -> Digests | None:
            if stall_timeout_s is None:
                return await self._digests(version_id, fetched, ask, grid, deadline, columns)
            return await run_under(
                lambda: self._digests(version_id, fetched, ask, grid, deadline, columns),
                lambda: self._silence(version_id, fetched, stall_timeout_s),
            )

        return await self._outcome(
            fetch,
            version_id,
            fetched.publication,
            deadline,
        )

    async def aclose(self) -> None:
        """Close every connection."""
        for endpoint in self._endpoints.values():
            await endpoint.aclose()
        self._endpoints.clear()

    def _require_every_slot(
        self, publications: Sequence[Publication], results: Sequence[Fetched | ModelExpressError]
    ) -> None:
        usable = {f.publication.slot_id for f in results if isinstance(f, Fetched)}
        for publication, result in zip(publications, results, strict=True):
            if isinstance(result, ModelExpressError) and publication.slot_id not in usable:
                raise result

    async def _outcome(
        self,
        fetch: Callable[[], Awaitable[T]],
        version_id: VersionId,
        publication: Publication,
        deadline: float,
    ) -> T | ModelExpressError:
        """What `fetch` returns, or its error, with which worker, slot and version it was about."""
        at = f"version {version_id}: {publication}"
        try:
            with anyio.fail_at(deadline):
                async with self._limiter:
                    return await fetch()
        except ModelExpressError as error:
            return _about(at, error)
        except TimeoutError:
            return DeadlineExceeded(f"{at}: no answer within the transfer's deadline")

    async def _fetch_one(self, version_id: VersionId, publication: Publication, deadline: float) -> Fetched:
        return _fetched(publication, *await self._manifest(version_id, publication, deadline))

    async def _manifest(
        self, version_id: VersionId, publication: Publication, deadline: float
    ) -> tuple[manifests.Manifest, Topology]:
        self.fetches += 1
        request = refit.GetWeightVersionShardManifestRequest(
            version_id=version_id, source_slot_id=publication.slot_id
        )
        endpoint = self._endpoint(publication.endpoint)
        call = endpoint.get_weight_version_shard_manifest
        metadata = {**(self._lease(version_id) or {}), ACCEPT_MANIFEST_HEADER: manifest_columns.NAME}
        answer = await _dialled_anew_once(
            lambda: call(request, timeout_s=self._timeout_s(deadline), metadata=metadata)
        )
        manifest = await _decoded(
            lambda: _checked_manifest(answer.manifest, answer.manifest_digest, publication),
            manifest_columns.body_bytes(answer.manifest),
        )
        # Another process of the same content has another agent, and so another manifest.
        self._manifests.put(publication.manifest_digest, (manifest, endpoint.topology))
        return manifest, endpoint.topology

    async def _digests(
        self,
        version_id: VersionId,
        fetched: Fetched,
        ask: Selection,
        grid: DigestGrid,
        deadline: float,
        columns: ColumnBlocks,
    ) -> Digests | None:
        publication = fetched.publication
        slabs, bands, tiles, groups = ask.bitmaps()
        request = v1.GetShardDigestsRequest(
            version_id=version_id,
            source_slot_id=publication.slot_id,
            selection=v1.DigestSelection(
                grid=GRID,
                first_row=ask.first_row,
                row_count=ask.wanted.shape[1],
                slabs=slabs,
                bands=bands,
                tiles=tiles,
                groups=groups,
            ),
        )
        try:
            answer = await self._ask_for_digests(publication, request, deadline, columns)
        except (NotFound, Unimplemented):
            return None  # a publisher of 0.7, or one that was told to make none
        except InvalidArgument:  # a publisher that cuts otherwise
            request.ClearField("selection")
            answer = await self._ask_for_digests(publication, request, deadline, columns)
        if hashlib.sha256(answer.digests).hexdigest() != answer.sha256:
            raise ManifestError(f"its digests have not the sha256 {answer.sha256!r} that came with them")
        table = fetched.manifest.manifest.table

        def decode() -> Digests:
            if is_answer(answer.digests):
                return Digests(decode_answer(answer.digests, ask, grid, publication.manifest_digest))
            whole = decode_digests(answer.digests, table, publication.manifest_digest)
            return Digests(whole.digests, whole)

        return await _decoded(decode, len(answer.digests))

    async def _ask_for_digests(
        self,
        publication: Publication,
        request: v1.GetShardDigestsRequest,
        deadline: float,
        columns: ColumnBlocks,
    ) -> v1.GetShardDigestsResponse:
        wanted: Metadata = {COLUMN_BLOCKS_HEADER: str(columns)} if columns.rules else {}
        call = self._endpoint(publication.endpoint).get_shard_digests
        # The publisher answers when it has hashed its shards, which may take longer than an RPC.
        return await _dialled_anew_once(
            lambda: call(
                request,
                timeout_s=max(deadline - anyio.current_time(), 0.001),
                metadata={**(self._lease(VersionId(request.version_id)) or {}), **wanted},
            )
        )

    async def _silence(self, version_id: VersionId, fetched: Fetched, stall_timeout_s: float) -> Exception:
        """Ask for no digests again and again, which whoever lives answers at once; return when it doesn't."""
        publication = fetched.publication
        request = v1.GetShardDigestsRequest(
            version_id=version_id,
            source_slot_id=publication.slot_id,
            selection=v1.DigestSelection(grid=GRID),
        )
        call = self._endpoint(publication.endpoint).get_shard_digests
        while True:
            await anyio.sleep(stall_timeout_s)
            try:
                await call(request, timeout_s=self._rpc_timeout_s, metadata=self._lease(version_id))
            except (DeadlineExceeded, Unavailable) as error:
                return TransferTimeout(
                    f"no digests for {stall_timeout_s:g} s, and then no answer whether it is there ({error})",
                    peer=fetched.manifest.source.agent_name,
                )
            except ModelExpressError:
                continue  # that is an answer, too

    def _endpoint(self, address: str) -> WorkerEndpoint:
        if address not in self._endpoints:
            self._endpoints[address] = self._connect(address)
        return self._endpoints[address]

    def _dial(self, address: str) -> WorkerEndpoint:
        token_path = envs.worker_auth_token_path()
        token = {} if token_path is None else {"credentials": worker_token(token_path)}
        return self._network.worker_endpoint(
            parse_address(address, what="manifest_endpoint"), rpc_timeout_s=self._rpc_timeout_s, **token
        )

    def _lease(self, version_id: VersionId) -> Metadata | None:
        """What names the lease that we hold while we ask."""
        if self._worker_id is None:
            return None
        lease_id = lease_id_of(version_id, self._worker_id)
        return {WORKER_ID_HEADER: self._worker_id.encode(), LEASE_ID_HEADER: lease_id.encode()}

    def _timeout_s(self, deadline: float) -> float:
        return max(min(self._rpc_timeout_s, deadline - anyio.current_time()), 0.001)

    async def _hang_up_on_all_but(self, publications: Sequence[Publication]) -> None:
        """Keep the connections that this version uses; a later one dials what it needs."""
        addresses = {publication.endpoint for publication in publications}
        for address in self._endpoints.keys() - addresses:
            await self._endpoints.pop(address).aclose()


async def _dialled_anew_once(call: Callable[[], Awaitable[T]]) -> T:
    """Call, and once more where the connection was broken: it may have been dropped while it was idle."""
    try:
        return await call()
    except rpc_errors.Unavailable:
        return await call()


def _fetched(publication: Publication, manifest: manifests.Manifest, topology: Topology) -> Fetched:
    source = SourceManifest.of(publication.slot_id, publication.worker_id, manifest)
    return Fetched(publication, source, topology)


def _checked_manifest(data: bytes, claimed: str, publication: Publication) -> manifests.Manifest:
    """Read a manifest in the encoding that it has; what it says is what the control plane was told."""
    if claimed == publication.manifest_digest and manifest_columns.is_columnar(data):
        return manifest_columns.decode_announced(data, claimed)
    own = manifests.digest(data)
    if not own == claimed == publication.manifest_digest:
        raise ManifestError(
            f"the manifest that it served has sha256 {own}, it says {claimed!r}, and "
            f"{publication.manifest_digest!r} was announced to the control plane"
        )
    return manifests.decode(data)


def _about(at: str, error: ModelExpressError) -> ModelExpressError:
    """The error, with which worker, slot and version it was about."""
    if isinstance(error, RpcError):
        kind: type[ModelExpressError] = Unavailable
        if isinstance(error, NotFound):
            kind = ManifestError  # announced, but not served: nothing that waiting would mend
        elif isinstance(error, (AccessDenied, rpc_errors.TlsError)):
            kind = AccessDenied
        elif isinstance(error, TimeoutError):
            kind = DeadlineExceeded
    elif isinstance(error, TransferError):
        return type(error)(f"{at}: {error}", peer=error.peer)
    else:
        kind = type(error) if isinstance(error, PeerError) else PeerError
    about = kind(f"{at}: {error}")
    about.__cause__ = error
    return about


async def _decoded(decode: Callable[[], T], size_bytes: int) -> T:
    if size_bytes < _THREAD_BYTES:
        return decode()
    return await anyio.to_thread.run_sync(decode)
