"""What a capture raises."""

from __future__ import annotations

from modelexpress_rl.errors import UsageError

WAYS_OUT = (
    "Describe the parameters with TorchGeneratorContext(slices=...), "
    "or read every tensor whole with load_weights_whole=True"
)


class CaptureRefused(UsageError):
    """`load_weights` does something that no copy of a box expresses; the message names it."""


def refused(what: str) -> CaptureRefused:
    """The refusal that says `what`, and what to do."""
    return CaptureRefused(f"load_weights: {what}. {WAYS_OUT}")
