"""One announcement of a shard, and what its answer means for the publication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import TryAgainError
from modelexpress_rl.rpc import ControlPlane, FailedPrecondition, NotFound, RpcError, Unauthenticated
from modelexpress_rl.train.version_watch import Stage, poll

# The answer need not repeat the version's slots: a thousand ranks would get a thousand each.
BRIEF = {"mx-brief": "1"}


@dataclass(frozen=True, slots=True)
class Filed:
    """The control plane has the shard, in the version's record that was created at `created_ms`."""

    created_ms: int


@dataclass(frozen=True, slots=True)
class Unheard:
    """No answer: try again. `may_be_filed` where the request may have been applied."""

    error: RpcError
    may_be_filed: bool


@dataclass(frozen=True, slots=True)
class Unregistered:
    """Refused because the control plane does not know us (any more): register, then try again."""

    error: RpcError


@dataclass(frozen=True, slots=True)
class NoVersion:
    """The control plane does not know the version."""

    error: RpcError


@dataclass(frozen=True, slots=True)
class Rejected:
    """Refused for good."""

    error: RpcError


Answer: TypeAlias = Filed | Unheard | Unregistered | NoVersion | Rejected


async def announce(control: ControlPlane, shard: refit.WeightVersionShard, timeout_s: float) -> Answer:
    """File the shard once; a repeat with the same content is harmless.

    0.7's wire answers FAILED_PRECONDITION both where the version is being released and where the
    worker is unknown, so a look at the version tells them apart.
    """
    request = refit.CreateWeightVersionShardRequest(shard=shard)
    try:
        answer = await control.create_weight_version_shard(request, timeout_s=timeout_s, metadata=BRIEF)
    except NotFound as error:
        return NoVersion(error)
    except FailedPrecondition as error:
        sight = await poll(control, shard.version_id)
        if sight is None:
            return Unheard(error, may_be_filed=False)
        return Unregistered(error) if sight.stage is Stage.OFFERED else Rejected(error)
    except RpcError as error:
        if error.outcome_unknown or isinstance(error, (TryAgainError, Unauthenticated)):
            return Unheard(error, may_be_filed=error.outcome_unknown)
        return Rejected(error)
    return Filed(answer.version.created_at_unix_ms)
