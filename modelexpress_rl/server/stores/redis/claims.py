"""The idempotency keys of a Redis store, and what keeps a store's keys from being there for ever."""

from __future__ import annotations

from modelexpress_rl.server.stores import codec
from modelexpress_rl.server.stores.port import KeyHolder
from modelexpress_rl.server.stores.redis import scripts
from modelexpress_rl.server.stores.redis.keys import Bucket
from modelexpress_rl.server.stores.redis.link import Call, command
from modelexpress_rl.server.stores.redis.space import KEPT_MS, Space
from statemachines.ids import VersionId

# How often a server puts off the end of what it keeps.
KEPT_ANEW_MS = 6 * 3600 * 1000


class Claims(Space):
    """The methods of `Store` that concern idempotency keys."""

    _kept_anew_at_ms = 0

    async def read_key(self, idempotency_key: str) -> KeyHolder | None:
        number, bucket = self._place(idempotency_key)
        key = bucket.idempotency(idempotency_key)
        body = (await self.link.one(command(number, "HGET", key, "body"))).value
        return None if body is None else codec.decode_holder(idempotency_key, body)

    async def claim_key(self, idempotency_key: str, holder: KeyHolder) -> KeyHolder:
        number, bucket = self._place(idempotency_key)
        call = Call(
            number,
            scripts.CLAIM,
            [bucket.idempotency(idempotency_key), bucket.claims],
            (holder.uid, codec.encode_holder(holder), idempotency_key, KEPT_MS),
            confirmed=True,
        )
        return codec.decode_holder(idempotency_key, (await self.link.one(call)).value)

    async def free_key(self, idempotency_key: str, uid: VersionId) -> None:
        await self._free(idempotency_key, uid, "")

    async def purge_keys(self, claimed_before_ms: int) -> int:
        pages = await self._every(
            lambda bucket: bucket.claims, "ZRANGEBYSCORE", "-inf", f"({claimed_before_ms}"
        )
        names = [member.decode() for page in pages for member in page]
        uids = await self._each(names, Bucket.idempotency, "HGET", "uid")
        holders = {name: (uid or b"").decode() for name, uid in zip(names, uids, strict=True)}
        versions = sorted({uid for uid in holders.values() if uid})
        there = await self._each(versions, Bucket.version, "HEXISTS", "revision")
        exist = {uid for uid, exists in zip(versions, there, strict=True) if exists}
        freed = 0
        for name, uid in holders.items():
            if uid not in exist:
                freed += await self._free(name, uid, claimed_before_ms)
        await self._keep_anew([name for name, uid in holders.items() if uid in exist], sorted(exist))
        return freed

    async def _free(self, idempotency_key: str, uid: str, claimed_before_ms: int | str) -> int:
        number, bucket = self._place(idempotency_key)
        where = [bucket.idempotency(idempotency_key), bucket.claims]
        freed: int = await self._run(number, scripts.FREE, where, uid, idempotency_key, claimed_before_ms)
        return freed

    async def _keep_anew(self, names: list[str], uids: list[str]) -> None:
        """Put off the end of everything that doesn't end by itself; a server is here that needs it."""
        now_ms = await self.now_ms()
        if now_ms < self._kept_anew_at_ms:
            return
        await self.link.all(
            [
                command(number, "PEXPIRE", key, KEPT_MS)
                for number, bucket in enumerate(self._buckets.all)
                for key in (*bucket.shared, bucket.meta)
            ]
        )
        await self._each(names, Bucket.idempotency, "PEXPIRE", KEPT_MS)
        for uid in uids:
            number, bucket = self._place(uid)
            await self._run(number, scripts.TOUCH, [bucket.version(uid)], KEPT_MS)
        self._kept_anew_at_ms = now_ms + KEPT_ANEW_MS
