"""What may be told of a server while it works; here nothing is done with it.

`metrics.Metrics` is the one that counts. Every method is called in the event loop and must not block.
"""

from __future__ import annotations


class Observer:
    """Hears of RPCs, commits, the store and the expiry loop."""

    def rpc_began(self, method: str) -> None:
        """A call arrived; `method` is `Service/Method` without the package."""

    def rpc_ended(self, method: str, code: str, duration_s: float, *, stream: bool) -> None:
        """A call was answered with this status."""

    def group_decided(self, size: int) -> None:
        """`size` commands of one version were decided together."""

    def committed(self) -> None:
        """A version's record was committed."""

    def conflicted(self) -> None:
        """A commit of a version was refused: another revision, or something had lapsed."""

    def expiry_lagged(self, lag_s: float) -> None:
        """By how much the longest overdue version of a round was late; 0 where none was."""

    def store_answered(self, operation: str, duration_s: float, *, failed: bool) -> None:
        """An operation of the store ended."""

    def store_reachable(self, reachable: bool) -> None:
        """What the last look at the store said."""


NOBODY = Observer()
