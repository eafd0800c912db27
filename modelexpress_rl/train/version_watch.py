"""What a trainer sees of one version, as a stream: pushed by our service, polled where it is missing."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum, auto

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.clock import Clock
from modelexpress_rl.rpc import Backoff, ControlPlane, NotFound, RpcError, Unimplemented

_log = logging.getLogger(__name__)

HEARTBEAT_MS = 2000
SILENCE_S = 6.0
_RECONNECT = Backoff(first_s=0.05, limit_s=2.0)
_POLL = Backoff(first_s=0.05, limit_s=1.0)


class Stage(Enum):
    """How far a version is, as far as a publisher cares."""

    OFFERED = auto()  # staging, ready or degraded
    RELEASING = auto()
    RETIRED = auto()
    GONE = auto()  # the control plane doesn't know it


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at a version. `live_leases` is None where the server doesn't say.

    `created_ms` (by the store's clock) tells one record from the next under the same id.
    """

    stage: Stage
    created_ms: int = 0
    live_leases: int | None = None
    missing_slots: frozenset[str] = frozenset()

    @property
    def unread(self) -> bool:
        """Whether the server says that no lease is live."""
        return self.live_leases == 0


_STAGES = {
    v1.VERSION_STATE_RELEASING: Stage.RELEASING,
    v1.VERSION_STATE_RETIRED: Stage.RETIRED,
    v1.VERSION_STATE_FORGOTTEN: Stage.GONE,
}


async def watch(
    control: ControlPlane, version_id: str, clock: Clock, *, created_ms: int | None = None
) -> AsyncGenerator[Sight, None]:
    """Yields what is seen of the version, for ever; a GONE one may be created again.

    With `created_ms` given, another record under the same id is seen as GONE. Dials again, with
    backoff, where the control plane goes away; a stream that broke or said nothing is made up for by
    one call. Close it (`contextlib.aclosing`).
    """
    rng = random.Random()
    failures = 0
    while True:
        request = v1.WatchVersionRequest(version_id=version_id, heartbeat_ms=HEARTBEAT_MS)
        try:
            async with control.watch_version(request, silence_s=SILENCE_S) as messages:
                async for message in messages:
                    failures = 0
                    if message.HasField("status"):
                        yield _as_record(_sight(message.status), created_ms)
        except Unimplemented:
            break
        except NotFound:
            yield Sight(Stage.GONE)
        except RpcError as error:
            _log.debug("watch of version %s: %s", version_id, error)
            # What lets calls through may yet hold streams back, as some proxies do.
            polled = await poll(control, version_id, created_ms=created_ms, timeout_s=SILENCE_S)
            if polled is not None:
                yield polled
        failures += 1
        await clock.sleep(_RECONNECT.delay_s(failures, rng))
    polls = 0
    while True:
        polled = await poll(control, version_id, created_ms=created_ms)
        if polled is not None:
            yield polled
        polls += 1
        await clock.sleep(_POLL.delay_s(polls, rng))


async def poll(
    control: ControlPlane,
    version_id: str,
    *,
    created_ms: int | None = None,
    timeout_s: float | None = None,
) -> Sight | None:
    """One look by 0.7's means; None where the control plane can't be asked now."""
    try:
        request = refit.GetWeightVersionRequest(uid=version_id)
        answer = await control.get_weight_version(request, timeout_s=timeout_s)
    except NotFound:
        return Sight(Stage.GONE)
    except RpcError as error:
        _log.debug("poll of version %s: %s", version_id, error)
        return None
    releasing = answer.version.state == refit.WEIGHT_VERSION_STATE_RELEASING
    stage = Stage.RELEASING if releasing else Stage.OFFERED
    return _as_record(Sight(stage, answer.version.created_at_unix_ms), created_ms)


def _as_record(sight: Sight, created_ms: int | None) -> Sight:
    is_another = created_ms is not None and sight.created_ms != created_ms
    return Sight(Stage.GONE) if is_another else sight


def _sight(status: v1.VersionStatus) -> Sight:
    return Sight(
        stage=_STAGES.get(status.state, Stage.OFFERED),
        created_ms=status.created_at_unix_ms,
        live_leases=status.live_leases,
        missing_slots=frozenset(status.missing_slots),
    )
