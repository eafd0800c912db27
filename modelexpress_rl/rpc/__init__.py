"""Talking to the control plane and to worker endpoints: channels, deadlines, retries, errors.

plane = ControlPlane(parse_address("localhost:8001"), rpc_timeout_s=5.0)
answer = await plane.get_weight_version(refit.GetWeightVersionRequest(uid="v1"))
async with plane.watch_version(v1.WatchVersionRequest(version_id="v1")) as messages:
    async for message in messages: ...
await plane.aclose()
"""

from modelexpress_rl.rpc.address import Address, parse_address, parse_addresses
from modelexpress_rl.rpc.auth import Credentials, NoCredentials, TokenFile
from modelexpress_rl.rpc.channel import GRPC_SERVER_OPTIONS, MAX_MESSAGE_BYTES
from modelexpress_rl.rpc.clients import (
    CONTROL_SERVICE,
    DIGEST_SERVICE,
    REFIT_SERVICE,
    WORKER_SERVICE,
    ControlPlane,
    WorkerEndpoint,
)
from modelexpress_rl.rpc.endpoint import EndpointServer
from modelexpress_rl.rpc.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    RpcError,
    TlsError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from modelexpress_rl.rpc.retry import Backoff, Retried, retry

__all__ = [
    "CONTROL_SERVICE",
    "DIGEST_SERVICE",
    "GRPC_SERVER_OPTIONS",
    "MAX_MESSAGE_BYTES",
    "REFIT_SERVICE",
    "WORKER_SERVICE",
    "Aborted",
    "Address",
    "AlreadyExists",
    "Backoff",
    "ControlPlane",
    "Credentials",
    "DeadlineExceeded",
    "EndpointServer",
    "FailedPrecondition",
    "InvalidArgument",
    "NoCredentials",
    "NotFound",
    "PermissionDenied",
    "ResourceExhausted",
    "Retried",
    "RpcError",
    "TlsError",
    "TokenFile",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "WorkerEndpoint",
    "parse_address",
    "parse_addresses",
    "retry",
]
