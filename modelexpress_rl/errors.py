"""Every error of `modelexpress_rl`: one root, and three families by what the caller can do.

`UsageError`: you called it wrong; the message names the argument. `PeerError`: another process sent
something wrong; the message names the tensor, version or worker. `TryAgainError`: nothing is wrong
with the request, the moment was; trying again may succeed.
"""

from __future__ import annotations


class ModelExpressError(Exception):
    """The root of every error that this package raises on purpose."""


class UsageError(ModelExpressError, ValueError):
    """An argument or a configuration value is not acceptable; the message names it."""


class StateError(ModelExpressError, RuntimeError):
    """The call is legal in general, but not in the state that the object is in."""


class PeerError(ModelExpressError):
    """Another process sent or served something that must not be used."""


class ManifestError(PeerError):
    """A manifest is malformed, hostile, or not the one that the control plane announced."""


class GeometryError(PeerError):
    """Shards and needs do not fit together: a gap, a disagreement, a range outside a tensor."""


class IncompleteVersionError(GeometryError):
    """Elements that the engine loads are published by nobody; the message names tensor and box."""


class DigestMismatch(PeerError):
    """Bytes that arrived are not the bytes that were published; the message names the tensor."""


class ObjectError(PeerError):
    """An object in storage is malformed, cut short, or not what the control plane or its index announced."""


class VersionGone(PeerError):
    """The version was released, retired or forgotten; it will not come back under this life."""


class AccessDenied(ModelExpressError):
    """Another process does not let us in: a certificate, a token or a lease; the message says which."""


class TryAgainError(ModelExpressError):
    """The operation may succeed when it is tried again."""


class Unavailable(TryAgainError):
    """A peer or the control plane could not be reached within the time given."""


class DeadlineExceeded(TryAgainError, TimeoutError):
    """A wait reached its bound; the message says what was waited for and how long."""


class LeaseLost(TryAgainError):
    """The version lease lapsed or was refused before the last read had completed."""


class TransferError(TryAgainError):
    """A read failed; `peer` names the agent that it read from."""

    def __init__(self, message: str, *, peer: str) -> None:
        super().__init__(message)
        self.peer = peer


class TransferTimeout(TransferError, TimeoutError):
    """A read did not end within its deadline; its buffers stay quarantined until it does."""


class FenceBroken(ModelExpressError):
    """What the fence stands for can no longer happen; the message says why."""


class EngineUncertain(StateError):
    """An install failed half-way: no version can be said to be served until one is installed."""
