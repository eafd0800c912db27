"""A real cluster of three: moved slots, moving slots, lost nodes, and changes through any node."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator

import anyio
import pytest

pytest.importorskip("redis", reason="the extra 'redis' is not installed")

from modelexpress_rl.server.stores.port import Change, Committed, KeyHolder, Resync, StoreUnavailable
from modelexpress_rl.server.stores.redis import RedisStore, keys, link
from tests.store.records import entry, published, retired, spec
from tests.store.redis_server import RedisCluster, RedisServer, need_redis
from tests.store.test_contract import put, put_worker

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """The module's own, which it takes apart; the last test kills a node of it."""
    need_redis()
    folder = tmp_path_factory.mktemp("broken-cluster")
    made = RedisCluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.kill()
        shutil.rmtree(folder)


@pytest.fixture
async def store(cluster: RedisCluster, request: pytest.FixtureRequest) -> AsyncIterator[RedisStore]:
    opened = RedisStore(f"{cluster.address}?prefix={request.node.name}")
    yield opened
    await opened.close()


def owner(cluster: RedisCluster, slot: int) -> RedisServer:
    for start, end, primary, *_ in cluster.nodes[0].client.execute_command("CLUSTER", "SLOTS"):
        if start <= slot <= end:
            port = int(primary[1])
            return next(node for node in cluster.nodes if node.port == port)
    raise AssertionError(slot)


def node_id(node: RedisServer) -> str:
    return str(node.client.execute_command("CLUSTER", "MYID").decode())


def in_bucket(store: RedisStore, number: int, count: int) -> list[str]:
    names = (f"v{n}" for n in range(100_000))
    return [name for name in names if store._buckets.number_of(name) == number][:count]


async def test_every_node_has_a_share_and_each_version_is_in_one_slot(
    cluster: RedisCluster, store: RedisStore
) -> None:
    for n in range(60):
        await store.claim_key(f"k{n}", KeyHolder(f"v{n}", spec(f"k{n}")))
        await put(store, entry(f"v{n}", n, key=f"k{n}"), wake_at_ms=n)
        await put_worker(store, f"w{n}", wake_at_ms=n)
    for node in cluster.nodes:
        mine = [key.decode() for key in node.client.scan_iter(match="{test_every*", count=1_000)]
        assert sum(":version:" in key for key in mine) > 5
        assert sum(":worker:" in key for key in mine) > 5
    assert await store.due_versions(1_000, 5) == ["v0", "v1", "v2", "v3", "v4"]
    listed = await store.list_versions("model", after=None, limit=100)
    assert [one.entry.record.uid for one in listed] == [f"v{n}" for n in range(60)]
    stored = (await store.read_version("v7")).stored
    await put(store, None, uid="v7", expected=stored.revision)  # and the key, which is elsewhere
    assert await store.read_key("k7") is None


async def test_one_node_of_the_address_is_enough(cluster: RedisCluster, store: RedisStore) -> None:
    made = {uid: await put(store, entry(uid, n)) for n, uid in enumerate("abcdefgh")}
    for node in cluster.nodes:
        one = RedisStore(f"redis-cluster://127.0.0.1:{node.port}?prefix={store.address.prefix}")
        for uid, commit in made.items():
            assert (await one.read_version(uid)).stored.revision == commit.revision
        await one.close()


async def test_changes_come_through_any_node(cluster: RedisCluster, store: RedisStore) -> None:
    async with store.changes() as changes:
        for n in range(12):
            await put(store, entry(f"v{n}", n))
            with anyio.fail_after(5):
                assert await anext(changes) == Change(f"v{n}", "model")


async def test_a_slot_moves_while_its_versions_are_committed(
    cluster: RedisCluster, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of a migration: ASK for keys that have left, TRYAGAIN for halves, MOVED at the end."""
    number = 3
    slot = keys.slot_of(store._buckets.all[number].tag)
    source = owner(cluster, slot)
    target = next(node for node in cluster.nodes if node is not source)
    mine, also_mine, new, never = in_bucket(store, number, 4)
    made = await put(store, entry(mine, 1), wake_at_ms=1)
    await put(store, entry(also_mine, 2), wake_at_ms=2)

    target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
    source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
    made = await put(
        store, published(mine, "t"), expected=made.revision
    )  # keys that all exist are still there
    assert isinstance(made, Committed)

    bucket = store._buckets.all[number]
    source.client.execute_command(
        "MIGRATE", "127.0.0.1", target.port, "", 0, 5_000, "KEYS", bucket.version(mine), bucket.revision
    )
    monkeypatch.setattr(link, "PATIENCE_S", 0.3)
    with pytest.raises(StoreUnavailable, match="is moving the keys to another node"):
        await put(store, entry(mine, 1), expected=made.revision)  # half here, half there
    assert (await store.read_version(mine)).stored.entry == published(mine, "t")  # ASK
    assert await store.active_versions("model") == [mine, also_mine]

    while left := source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
        source.client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5_000, "KEYS", *left)
    made = await put(store, entry(mine, 1), expected=made.revision, wake_at_ms=3)  # ASK with a script
    assert isinstance(made, Committed)
    with pytest.raises(StoreUnavailable, match="is moving"):
        await put(store, entry(new, 1))  # its key is on neither side: not before the move is over
    for node in (target, source, *cluster.nodes):
        node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", node_id(target))
    made = await put(store, retired(mine, 1), expected=made.revision)  # MOVED
    assert isinstance(made, Committed)
    assert isinstance(await put(store, entry(new, 1)), Committed)
    assert (await store.read_version(also_mine)).stored.entry == entry(also_mine, 2)
    assert set(await store.active_versions("model")) == {also_mine, new}
    assert (await store.read_version(never)).stored is None


async def test_a_node_that_dies_is_named_and_its_return_is_noticed(
    cluster: RedisCluster, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without replicas a third of the store is away."""
    monkeypatch.setattr(link, "PATIENCE_S", 1.0)
    async with store.changes() as changes:
        victim = cluster.nodes[2]
        slots = [keys.slot_of(bucket.tag) for bucket in store._buckets.all]
        number = next(n for n, slot in enumerate(slots) if owner(cluster, slot) is victim)
        (uid,) = in_bucket(store, number, 1)
        made = await put(store, entry(uid, 1))
        assert (await anext(changes)).uid == uid
        await anyio.to_thread.run_sync(victim.kill)
        with pytest.raises(StoreUnavailable, match=r"\(at 127\.0\.0\.1:\d+\)|cluster that is down"):
            await put(store, retired(uid, 1), expected=made.revision)
        await anyio.to_thread.run_sync(victim.start)  # empty: it had nothing on disk
        with anyio.fail_after(20):
            while True:
                try:
                    if (await store.read_version(uid)).stored is None:
                        break
                except StoreUnavailable:
                    pass
            while await anext(changes) != Resync():
                pass
        assert isinstance(await put(store, entry(uid, 1)), Committed)
