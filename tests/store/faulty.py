"""A store that fails when it is told to: before a commit, or after it, when the reply is lost."""

from __future__ import annotations

from typing import Any

from modelexpress_rl.server.stores.port import Store, StoreUnavailable


class FaultyStore:
    """Passes everything on; `fail_before` and `fail_after` count the commits that fail next."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.fail_before = 0
        self.fail_after = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit_version(self, *arguments: Any, **named: Any) -> Any:
        return await self._commit(self._store.commit_version, *arguments, **named)

    async def commit_worker(self, *arguments: Any, **named: Any) -> Any:
        return await self._commit(self._store.commit_worker, *arguments, **named)

    async def _commit(self, commit: Any, *arguments: Any, **named: Any) -> Any:
        if self.fail_before:
            self.fail_before -= 1
            raise StoreUnavailable("the test cut the store off before the commit")
        result = await commit(*arguments, **named)
        if self.fail_after:
            self.fail_after -= 1
            raise StoreUnavailable("the test lost the reply of the commit")
        return result
