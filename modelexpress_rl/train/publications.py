"""All publications of one client: at most one at a time per version and slot."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import anyio

from modelexpress_rl.errors import StateError
from modelexpress_rl.rpc.registration import (
    Answering,
    Lost,
    Reachable,
    RegistrationEvent,
    Unreachable,
)
from modelexpress_rl.train.fences import Fence, completed_fence
from modelexpress_rl.train.publication import Publication
from modelexpress_rl.train.publication_ports import PublicationPorts
from statemachines import publication_records as records
from statemachines.publication_records import PublicationState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    publication: Publication
    content: object


class Publications:
    """Begins, finds, releases and closes publications, and tells them of the registration."""

    def __init__(self, ports: PublicationPorts) -> None:
        self._ports = ports
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._closing = False

    def begin(self, version_id: str, slot_id: str, content: object) -> tuple[Publication, bool]:
        """The publication of this version and slot, and whether it is a new one, to be captured.

        `content` says by equality whether the buffers are the same: staging them twice is a no-op.

        Raises:
            StateError: another content is staged or published as this version and slot, or the client
                is closing. The one that is there keeps its buffers.
        """
        if self._closing:
            raise StateError(f"version {version_id}: the trainer client is closed")
        key = version_id, slot_id
        entry = self._entries.get(key)
        if entry is not None:
            if entry.content == content:
                return entry.publication, False
            raise StateError(
                f"{entry.publication} is {entry.publication.state.value} with {entry.content}; a second "
                f"publication of it with {content} is refused. Release it first, or stage another version"
            )
        publication = Publication(self._ports, version_id, slot_id, on_end=self._ended)
        self._entries[key] = _Entry(publication, content)
        return publication, True

    @property
    def live(self) -> tuple[Publication, ...]:
        """Those that are neither REUSABLE nor FAILED, oldest first."""
        return tuple(entry.publication for entry in self._entries.values())

    def release(self, version_id: str) -> Fence:
        """Want the buffers of a version back; the fence says when they are.

        A version that isn't staged here (never, or no more) has nothing to wait for.
        """
        for publication in self.live:
            if publication.version_id == version_id:
                publication.release()
                return publication.source_reuse_ready
        return completed_fence(f"source_reuse_ready of version {version_id}")

    def registration_changed(self, event: RegistrationEvent) -> None:
        """Tell every publication what became of the registration."""
        registration, lease_ms = self._ports.registration, self._ports.lease_bound_ms
        for publication in self.live:
            match event:
                case Unreachable():
                    publication.handle(records.ServerUnreachable(registration.readers_gone_ms(lease_ms)))
                case Lost():
                    publication.handle(records.RegistrationLost(registration.readers_gone_ms(lease_ms)))
                case Answering() if publication.state is PublicationState.ORPHANED:
                    later_ms = registration.readers_gone_if_renewed_ms(lease_ms)
                    publication.handle(records.ServerUnreachable(later_ms))
                case Reachable():
                    publication.registered_again()

    def crashed(self, error: BaseException) -> None:
        """The background is gone: break every fence that is open."""
        for publication in self.live:
            publication.crashed(f"the trainer's background crashed: {error!r}")

    async def aclose(self, timeout_s: float) -> None:
        """Release everything and wait for readers, at most `timeout_s`; idempotent.

        What has not drained by then ends as FAILED, and its fences break.
        """
        self._closing = True
        if (failure := self._ports.background.failure) is not None:
            self.crashed(failure)  # nothing can be driven to its end any more
            self._entries.clear()
            return
        for publication in self.live:
            publication.close()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(timeout_s):
                for publication in self.live:
                    await publication.wait_ended()
            for publication in self.live:
                _log.warning("%s: still %s at the close deadline", publication, publication.state.value)
                publication.handle(records.CloseDeadlinePassed())

    def _ended(self, publication: Publication) -> None:
        self._entries.pop((publication.version_id, publication.slot_id), None)
