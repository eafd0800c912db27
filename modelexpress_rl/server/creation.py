"""CreateWeightVersion: repeats first, then the base, then the claim of the key, then the record.

A key is claimed before its version is made, so that two requests under one key never make two
versions. Where a server dies in between, the repeat finds its own claim and makes the version. Without
a repeat the claim is freed after `claim_ttl_ms`: so the version is committed before that, or not at all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import uuid4

from modelexpress_rl.server.stores.port import (
    Committed,
    KeyHolder,
    Rejected,
    Store,
    StoreUnavailable,
    VersionEntry,
)
from modelexpress_rl.server.views import View, view, views
from statemachines import version
from statemachines.ids import VersionId
from statemachines.kernel import Reason, Refused
from statemachines.spec import VersionSpec, validate
from statemachines.version import Moment, VersionRecord, VersionState

_CLAIMS = 3


async def create(
    store: Store,
    uid: VersionId | None,
    spec: VersionSpec,
    settle: Callable[[VersionId], Awaitable[None]],
    require_room: Callable[[VersionSpec], Awaitable[None]],
    claim_ttl_ms: int,
) -> tuple[View, bool]:
    """Create a version, or find the one that an equal request created; answers whether it is new.

    `settle` commits what is due on a version: one whose retention is over gives up its uid then.
    `require_room` raises where the quotas leave none for a new version.

    Raises:
        Refused: the request contradicts itself, its base does not serve, or key or uid are taken.
        StoreUnavailable: again and again the store took longer than a claim lives.
    """
    validate(spec)
    holder = await store.read_key(spec.idempotency_key)
    if holder is not None:
        _require_same(holder, uid, spec)
        if (present := await _present(store, holder.uid, settle)) is not None:
            return _require_own(present, spec), False
    elif uid is not None and (present := await _present(store, uid, settle)) is not None:
        return _require_own(present, spec), False
    await _require_base(store, spec)
    if holder is None:
        await require_room(spec)
    wanted = KeyHolder(uid or VersionId(uuid4().hex[:8]), spec)
    for _ in range(_CLAIMS):
        now_ms = await store.now_ms()  # before the claim, which so lives longer than is counted on
        holder = await store.claim_key(spec.idempotency_key, wanted)
        _require_same(holder, uid, spec)
        made = await _make(store, holder, now_ms, now_ms + claim_ttl_ms)
        if made is not None:
            return made
    raise StoreUnavailable(
        f"version {wanted.uid} was not created: {_CLAIMS} times the store took longer for it than the "
        f"{claim_ttl_ms} ms for which the claim of an idempotency key is kept"
    )


async def _make(
    store: Store, holder: KeyHolder, now_ms: int, valid_until_ms: int
) -> tuple[View, bool] | None:
    """Commit the record of a claim; None where that may have been freed meanwhile."""
    sequence = await store.next_sequence()
    record = version.begin(holder.uid, holder.spec, now_ms, sequence)
    ready = record.state is VersionState.READY
    entry = VersionEntry(record, now_ms if ready else 0, "created READY" if ready else "created")
    result = await store.commit_version(
        holder.uid, entry, expected_revision=None, valid_until_ms=valid_until_ms, wake_at_ms=None
    )
    if result is Rejected.LATE:
        return None
    if isinstance(result, Committed):
        return View(entry, result.revision, Moment(now_ms)), True
    present = await view(store, holder.uid)
    if present.record.spec.idempotency_key != holder.spec.idempotency_key:
        await store.free_key(holder.spec.idempotency_key, holder.uid)
    return _require_own(present, holder.spec), False


async def _present(
    store: Store, uid: VersionId, settle: Callable[[VersionId], Awaitable[None]]
) -> View | None:
    read = await store.read_version(uid)
    if read.stored is None:
        return None
    (found,) = await views(store, [read.stored], read.now_ms)
    if found.record.state is not VersionState.FORGOTTEN:
        return found
    await settle(uid)
    return None


def _require_same(holder: KeyHolder, uid: VersionId | None, spec: VersionSpec) -> None:
    if holder.spec != spec or (uid is not None and uid != holder.uid):
        raise Refused(
            Reason.EXISTS,
            f"idempotency_key {spec.idempotency_key!r} was used for another request, "
            f"which created version {holder.uid}",
        )


def _require_own(present: View, spec: VersionSpec) -> View:
    """The record that is there, where this very request made it."""
    record: VersionRecord = present.record
    if record.spec.idempotency_key != spec.idempotency_key:
        raise Refused(
            Reason.EXISTS, f"version {record.uid} already exists, created under another idempotency_key"
        )
    if record.spec != spec:
        raise Refused(
            Reason.EXISTS,
            f"idempotency_key {spec.idempotency_key!r} was used for another request, "
            f"which created version {record.uid}",
        )
    return present


async def _require_base(store: Store, spec: VersionSpec) -> None:
    if spec.base_version_id is None:
        return
    base = (await view(store, spec.base_version_id)).record
    if base.spec.model_name != spec.model_name:
        raise Refused(
            Reason.PRECONDITION,
            f"base version {base.uid} is of model {base.spec.model_name!r}, not {spec.model_name!r}",
        )
    if base.state is not VersionState.READY:
        raise Refused(
            Reason.PRECONDITION, f"base version {base.uid} is {base.state.value}: a delta needs a READY base"
        )
