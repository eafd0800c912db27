"""gRPC statuses as exceptions: one class that is `grpc.RpcError` and ours, and a family per status.

Frameworks catch `grpc.RpcError` and ask `.code()`; our own code catches the subclasses, or
`TryAgainError`. What a caller of a lost call must know besides is `outcome_unknown`.
"""

from __future__ import annotations

from typing import Any

import grpc

from modelexpress_rl import errors


class RpcError(errors.ModelExpressError, grpc.RpcError):
    """A call did not succeed; `code()` and `details()` say how, as `grpc.RpcError`'s do.

    Attributes:
        method: the RPC's name, without its service.
        address: whom it was sent to.
        outcome_unknown: True where the request may have been applied although no answer says so (the
            reply was lost, the deadline passed, the server failed half-way); False where it was
            certainly not applied: never sent, or refused by the server.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str,
        *,
        method: str,
        address: str,
        outcome_unknown: bool,
    ) -> None:
        super().__init__(f"{method} at {address}: {code.name}: {details}")
        self._code = code
        self._details = details
        self.method = method
        self.address = address
        self.outcome_unknown = outcome_unknown

    def code(self) -> grpc.StatusCode:
        """The status, as grpc's enum."""
        return self._code

    def details(self) -> str:
        """What the server said, or what failed on the way to it."""
        return self._details

    def initial_metadata(self) -> tuple[Any, ...]:
        """Empty; here for code that expects a `grpc.Call`."""
        return ()

    def trailing_metadata(self) -> tuple[Any, ...]:
        """Empty; here for code that expects a `grpc.Call`."""
        return ()

    def debug_error_string(self) -> str:
        """The whole message, with method and address."""
        return str(self)


class Unavailable(RpcError, errors.Unavailable):
    """The peer could not be reached, or the connection broke."""


class TlsError(Unavailable):
    """The certificates of a connection suit one of its sides not; trying again at once is no use."""


class DeadlineExceeded(RpcError, errors.DeadlineExceeded):
    """No answer within the call's deadline."""


class Aborted(RpcError, errors.TryAgainError):
    """The server lost a race and applied nothing."""


class Cancelled(RpcError, errors.TryAgainError):
    """The server, or something on the way to it, dropped the call: gRPC's own do so when overloaded."""


class NotFound(RpcError):
    """The server does not know the subject of the call."""


class AlreadyExists(RpcError):
    """The identity is taken by something else."""


class FailedPrecondition(RpcError):
    """The subject is not in a state that allows the call."""


class InvalidArgument(RpcError, errors.UsageError):
    """The request can never be accepted."""


class ResourceExhausted(RpcError):
    """A quota of the server is used up, or a message is too large; the message says which."""


class Unauthenticated(RpcError, errors.AccessDenied):
    """The bearer token is missing or wrong."""


class PermissionDenied(RpcError, errors.AccessDenied):
    """The server knows who asks, and does not give it; a trainer asks for a lease, for example."""


class Unimplemented(RpcError):
    """The server does not know the call: fall back."""


_CLASSES: dict[grpc.StatusCode, type[RpcError]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
}

_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}

# Answers after which the request may nevertheless have been applied: the server itself gave up
# half-way, or something between us and it answered in its place.
_OUTCOME_OPEN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DATA_LOSS,
    }
)


def rpc_error(
    code: grpc.StatusCode, details: str, *, method: str, address: str, outcome_unknown: bool
) -> RpcError:
    """The error of the class that `code` belongs to."""
    kind = _CLASSES.get(code, RpcError)
    return kind(code, details, method=method, address=address, outcome_unknown=outcome_unknown)


def answered(number: int, details: str | None, *, method: str, address: str) -> RpcError:
    """The error for a status that the server answered, by its wire number."""
    code = _BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)
    return rpc_error(
        code, details or "", method=method, address=address, outcome_unknown=code in _OUTCOME_OPEN
    )
