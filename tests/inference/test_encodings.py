"""Which encoding of a manifest a reader gets: columns where both ends know them, version 1 elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest

from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import ManifestError
from modelexpress_rl.inference.lease import Publication
from modelexpress_rl.inference.sources import SourceFetcher, VersionSources
from modelexpress_rl.reshard import manifest as version_1
from modelexpress_rl.reshard import manifest_columns as columns
from modelexpress_rl.reshard.geometry import Shard, ShardTable
from modelexpress_rl.reshard.manifest import Manifest
from modelexpress_rl.rpc import WorkerEndpoint, parse_address
from modelexpress_rl.rpc.endpoint import ACCEPT_MANIFEST_HEADER
from modelexpress_rl.train.adapter import WeightVersionShardManifest
from modelexpress_rl.train.manifest_service import ManifestService, ServedShard
from statemachines.ids import VersionId, WorkerId

pytestmark = pytest.mark.anyio

ROWS = [
    Shard(f"layer.{i}.weight", "torch.bfloat16", (8, 4), (0, 0), (8, 4), 4096 + 64 * i) for i in range(50)
]
MANIFEST = Manifest("agent", "127.0.0.1:5555", bytes(64), ShardTable.build(ROWS))
DOCUMENT, COLUMNS = columns.encodings(MANIFEST)
REQUEST = refit.GetWeightVersionShardManifestRequest(version_id="v1", source_slot_id="s")


@asynccontextmanager
async def serving(*served: WeightVersionShardManifest) -> AsyncIterator[ManifestService]:
    """A trainer's endpoint; versions v1, v2, ... in slot s."""
    service = ManifestService("127.0.0.1")
    await service.start()
    for number, manifest in enumerate(served, 1):
        service.serve(f"v{number}", "s", ServedShard(manifest))
    try:
        yield service
    finally:
        await service.aclose()


def published(columns: bytes | None, document: bytes = DOCUMENT) -> WeightVersionShardManifest:
    return WeightVersionShardManifest(document, 50, 3200, columns=columns)


async def fetched(fetcher: SourceFetcher, service: ManifestService, version: str = "v1") -> VersionSources:
    digest = service.served[version, "s"].manifest.digest
    publication = Publication("s", WorkerId("w0"), digest, service.endpoint, 50, 3200)
    return await fetcher.fetch(VersionId(version), [publication], anyio.current_time() + 20)


@pytest.mark.parametrize(
    ("accepts", "expected"),
    [
        (None, DOCUMENT),
        ("zstd", DOCUMENT),
        ("columns-2", DOCUMENT),
        ("columns-1", COLUMNS),
        ("columns-2, columns-1", COLUMNS),
    ],
)
async def test_columns_are_for_those_who_ask_for_them(accepts: str | None, expected: bytes) -> None:
    async with (
        serving(published(COLUMNS)) as service,
        WorkerEndpoint(parse_address(service.endpoint)) as reader,
    ):
        metadata = None if accepts is None else {ACCEPT_MANIFEST_HEADER: accepts}
        answer = await reader.get_weight_version_shard_manifest(REQUEST, metadata=metadata)
        assert answer.manifest == expected
        assert answer.manifest_digest == version_1.digest(DOCUMENT)


@pytest.mark.parametrize("theirs", [COLUMNS, None], ids=["columns", "an older trainer"])
async def test_either_encoding_gives_the_same_manifest(theirs: bytes | None) -> None:
    async with serving(published(theirs)) as service:
        fetcher = SourceFetcher(rpc_timeout_s=10)
        found = (await fetched(fetcher, service)).manifests[0].manifest
        assert version_1.encode(found) == DOCUMENT
        await fetcher.aclose()


async def test_columns_that_say_anything_else_are_refused_by_name() -> None:
    table = dataclasses.replace(MANIFEST.table, addr=MANIFEST.table.addr + np.uint64(64))
    other = columns.encode(dataclasses.replace(MANIFEST, table=table))
    for served in (other, COLUMNS[:-1], columns.MAGIC, b"MXC1 and more"):
        async with serving(published(served)) as service:
            fetcher = SourceFetcher(rpc_timeout_s=10)
            with pytest.raises(ManifestError, match=r"version v1: worker 'w0' \(slot 's', at .*manifest: "):
                await fetched(fetcher, service)
            await fetcher.aclose()


async def test_a_version_with_the_manifest_of_one_before_is_not_asked_for() -> None:
    moved = dataclasses.replace(
        MANIFEST, table=dataclasses.replace(MANIFEST.table, addr=MANIFEST.table.addr + np.uint64(64))
    )
    document, encoded = columns.encodings(moved)
    async with serving(published(COLUMNS), published(encoded, document), published(COLUMNS)) as service:
        fetcher = SourceFetcher(rpc_timeout_s=10)
        first = await fetched(fetcher, service, "v1")
        second = await fetched(fetcher, service, "v2")
        assert (fetcher.fetches, first.key == second.key) == (2, False)
        third = await fetched(fetcher, service, "v3")
        assert (fetcher.fetches, first.key == third.key) == (2, True)
        assert third.manifests[0].manifest is first.manifests[0].manifest
        await fetcher.aclose()
