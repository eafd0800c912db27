"""Claims of idempotency keys: one that no version followed is freed in time, and never under a version."""

from __future__ import annotations

from typing import Any

import pytest

from modelexpress_rl.server.expiry import Expiry
from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.settings import LEAST_CLAIM_MS, Settings
from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.server.stores.port import StoreUnavailable
from statemachines.kernel import Reason, Refused
from tests.store.faulty import FaultyStore
from tests.store.records import spec
from tests.store.virtual_clock import VirtualClock

pytestmark = pytest.mark.anyio

RETENTION_MS = 10_000
SETTINGS = Settings(retention_ms=RETENTION_MS)


class SlowStore(FaultyStore):
    """Time passes between the claim of a key and the record, as when a server is stopped there."""

    def __init__(self, store: MemoryStore, clock: VirtualClock, *delays_ms: int) -> None:
        super().__init__(store)
        self.clock_of_test = clock
        self.delays_ms = list(delays_ms)
        self.between: Any = None

    async def next_sequence(self) -> int:
        if self.delays_ms:
            self.clock_of_test.advance(self.delays_ms.pop(0))
            if self.between is not None:
                await self.between()
        return await self._store.next_sequence()


async def test_an_interrupted_creation_is_repeated_within_the_expiry_and_forgotten_after_it() -> None:
    clock = VirtualClock()
    store = FaultyStore(MemoryStore(clock))
    async with Registry.running(store, SETTINGS) as registry:
        expiry = Expiry(registry, clock)
        for key in ("repeated", "forgotten"):
            store.fail_before = 1
            with pytest.raises(StoreUnavailable):
                await registry.create(None, spec(key))
        held = await store.read_key("repeated")
        assert held is not None
        for _ in range(10):
            clock.advance(RETENTION_MS // 10)
            await expiry.run_once()
        assert await store.read_key("forgotten") is not None  # its time is just over
        view = await registry.create(None, spec("repeated"))
        assert view.record.uid == held.uid
        clock.advance(RETENTION_MS // 2)
        await expiry.run_once()
        assert await store.read_key("forgotten") is None
        assert (await registry.create(None, spec("repeated"))).record.uid == held.uid
        other = await registry.create(None, spec("forgotten", "other model"))
        assert other.record.spec.model_name == "other model"


async def test_a_repeat_renews_the_claim() -> None:
    clock = VirtualClock()
    store = FaultyStore(MemoryStore(clock))
    async with Registry.running(store, SETTINGS) as registry:
        expiry = Expiry(registry, clock)
        for _ in range(4):
            store.fail_before = 1
            with pytest.raises(StoreUnavailable):
                await registry.create(None, spec("k"))
            clock.advance(RETENTION_MS * 3 // 4)
            await expiry.run_once()
            assert await store.read_key("k") is not None


async def test_a_server_that_stood_still_claims_again() -> None:
    clock = VirtualClock()
    store = SlowStore(MemoryStore(clock), clock, RETENTION_MS)
    async with Registry.running(store, SETTINGS) as registry:
        view = await registry.create("v", spec("k"))
        held = await store.read_key("k")
        assert held is not None
        assert held.uid == view.record.uid == "v"


async def test_two_requests_never_share_a_key_however_long_a_server_stood_still() -> None:
    clock = VirtualClock()
    store = SlowStore(MemoryStore(clock), clock, RETENTION_MS + 1)
    async with Registry.running(store, SETTINGS) as slow, Registry.running(store, SETTINGS) as other:

        async def meanwhile() -> None:
            await Expiry(other, clock).run_once()
            await other.create("theirs", spec("k", "other model"))

        store.between = meanwhile
        with pytest.raises(Refused, match="idempotency_key 'k' was used for another request") as caught:
            await slow.create("mine", spec("k"))
        assert caught.value.reason is Reason.EXISTS
        versions = await store.list_versions(None, after=None, limit=10)
        assert [one.entry.record.uid for one in versions] == ["theirs"]


async def test_a_store_that_is_always_too_slow_is_named() -> None:
    clock = VirtualClock()
    store = SlowStore(MemoryStore(clock), clock, *(LEAST_CLAIM_MS,) * 3)
    async with Registry.running(store, Settings(retention_ms=0)) as registry:
        with pytest.raises(
            StoreUnavailable, match="version v was not created: 3 times the store took longer"
        ):
            await registry.create("v", spec("k"))
        assert (await registry.create("v", spec("k"))).record.uid == "v"
