"""Staging while the engine generates: what vLLM's protocol does not have, by its worker extension.

`--worker-extension-cls modelexpress_rl.inference.engines.vllm.ahead.StagesAhead` adds a method to vLLM's
workers, to be called by `collective_rpc` as soon as a version is READY. `update_weights` with that version
then finds it staged, so that the engine pauses for the install alone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelexpress_rl.inference.client import ModelExpressGeneratorClient, StagedWeightHandle

_log = logging.getLogger(__name__)


class StagesAhead:
    """Mixed into vLLM's worker."""

    weight_transfer_engine: Any

    def stage_weight_version(self, version_id: str) -> bool:
        """Begin to stage a version on this rank, and answer at once whether it is staged already.

        Again is harmless, and begins anew what has failed; another version takes the place of one that is
        staged. What goes wrong is logged, and met again by `update_weights`, which stages what is not staged.

        Raises:
            StateError: `init_weight_transfer_engine` was not called.
        """
        staged: bool = self.weight_transfer_engine.stage_ahead(version_id)
        return staged

    def weight_version_staging(self, version_id: str) -> str:
        """How the staging of a version stands on this rank, which begins nothing.

        "staged", "staging", or why it failed; "none" where it was never begun, or another took its place.
        """
        ahead: Ahead | None = self.weight_transfer_engine.ahead
        return "none" if ahead is None or ahead.version_id != version_id else ahead.standing


class Ahead:
    """One version that is staged in a thread of its own, once `before` has ended and is released."""

    def __init__(
        self, client: ModelExpressGeneratorClient, version_id: str, before: Ahead | None = None
    ) -> None:
        self.version_id = version_id
        self._before = before
        self._staged: Future[StagedWeightHandle] = Future()
        # As a daemon, since what it waits for ends with the client, which need not be closed.
        threading.Thread(
            target=self._stage, args=(client,), name=f"stages {version_id} ahead", daemon=True
        ).start()

    @property
    def ended(self) -> bool:
        """Whether it is staged, or failed."""
        return self._staged.done()

    @property
    def failed(self) -> bool:
        """Whether it failed."""
        return self.ended and self._staged.exception() is not None

    @property
    def standing(self) -> str:
        """ "staged", "staging", or why it failed: the error's class and its words."""
        if not self.ended:
            return "staging"
        error = self._staged.exception()
        return "staged" if error is None else f"{type(error).__name__}: {error}"

    def staged(self) -> StagedWeightHandle | None:
        """Wait for the end, at most as long as staging takes; None where it failed."""
        try:
            return self._staged.result()
        except Exception as error:  # noqa: BLE001 (whoever asks stages again, and meets it)
            _log.warning("version %s could not be staged ahead: %s", self.version_id, error)
            return None

    def discard(self) -> None:
        """Wait for the end, and release what was staged."""
        if (staged := self.staged()) is not None:
            staged.release()

    def _stage(self, client: ModelExpressGeneratorClient) -> None:
        try:
            if self._before is not None:
                with contextlib.suppress(Exception):
                    self._before.discard()
                self._before = None
            self._staged.set_result(client.stage_weight(self.version_id))
        except BaseException as error:  # noqa: BLE001 (it belongs to whoever waits)
            self._staged.set_exception(error)
