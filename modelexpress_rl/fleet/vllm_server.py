"""A `vllm serve` with our weight transfer backend as a generator of a fleet, over vLLM's own endpoints.

vLLM's own protocol stages and installs in one call: then `stage` only proves that the server is there, and
`install` moves the bytes while the server is paused. With our worker extension `stage` stages, while the
server generates. Within a server all ranks install or none does. What it holds is kept in
vLLM's own label of its weights, so an orchestrator that starts again reads it there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import anyio

from modelexpress_rl import arguments, errors
from modelexpress_rl.errors import (
    ModelExpressError,
    PeerError,
    StateError,
    TryAgainError,
    UsageError,
    VersionGone,
)
from modelexpress_rl.fleet import http_json
from modelexpress_rl.fleet.port import Holding

_NEVER_UPDATED = "default"
_UNCERTAIN = "mx-uncertain "
_POLL_S = 0.1
_MODES = ("keep", "wait", "abort")


class VllmServer:
    """A `FleetGenerator`; holds no connection.

    `pause_mode` is vLLM's: requests that run are kept and go on (keep), waited for (wait) or aborted
    (abort). `stages_ahead`: the server runs with `--worker-extension-cls
    modelexpress_rl.inference.engines.vllm.ahead.StagesAhead`; what it staged is kept until another version
    takes its place. `timeout_s` bounds the calls that move no weights, `transfer_timeout_s` the one that
    does. All updates of the server go through a fleet, which its label of the weights is left to. vLLM has no
    timer: a server that was paused for an update stays so until an orchestrator admits it again.
    """

    def __init__(
        self,
        url: str,
        *,
        pause_mode: str = "keep",
        stages_ahead: bool = False,
        timeout_s: float = 30.0,
        transfer_timeout_s: float = 900.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"url: expected http:// or https://, got {arguments.shown(url)}")
        if pause_mode not in _MODES:
            raise UsageError(
                f"pause_mode: expected one of {', '.join(_MODES)}, got {arguments.shown(pause_mode)}"
            )
        self.url = url.rstrip("/")
        self._pause_mode = pause_mode
        self._stages_ahead = stages_ahead
        self._timeout_s = arguments.seconds("timeout_s", timeout_s)
        self._transfer_timeout_s = arguments.seconds("transfer_timeout_s", transfer_timeout_s)
        self._headers = dict(headers or {})

    async def initialize(self, init_info: Mapping[str, Any] | None = None) -> None:
        """Have the server's ranks register with the control plane; once in the server's life.

        `init_info` is that of `ModelExpressWeightTransferInitInfo`.

        Raises:
            StateError: the server refuses; its log says why.
        """
        await self._post("init_weight_transfer_engine", {"init_info": dict(init_info or {})})

    async def stage(self, version_id: str, *, keep_s: float) -> None:
        """Stage the version on every rank, if the server can; else only prove that it answers.

        Raises:
            VersionGone: the version was released.
            TryAgainError: a rank failed to stage it, and may succeed next time.
            StateError: a rank failed for good.
        """
        holding = await self.holds()
        if not self._stages_ahead or (holding.certain and holding.version_id == version_id):
            return
        await self._of_ranks("stage_weight_version", version_id)
        while True:
            standing = await self._of_ranks("weight_version_staging", version_id)
            for rank, each in enumerate(standing):
                if each not in ("staged", "staging"):
                    raise _failure(each, f"version {version_id} is not staged on rank {rank} of {self.url}")
            if all(each == "staged" for each in standing):
                return
            await anyio.sleep(_POLL_S)

    async def install(self, version_id: str, *, hold_s: float) -> None:
        """Pause the server and update it; it stays paused. `hold_s` has no counterpart in vLLM.

        Raises:
            StateError: the update failed. Where a part of it was written the server is uncertain.
        """
        holding = await self.holds()
        await self._post(f"pause?mode={self._pause_mode}")
        if holding.certain and holding.version_id == version_id:
            return
        before = holding.version_id or _NEVER_UPDATED
        await self._label(_UNCERTAIN + before)
        await self._begin_session()
        try:
            await self._post(
                "update_weights",
                {"update_info": {"version_id": version_id}},
                timeout_s=self._transfer_timeout_s,
            )
        except StateError as error:
            if holding.certain and await self._is_intact():
                await self._label(before)
            raise StateError(f"version {version_id} was not installed: {error}") from error
        await self._post("finish_weight_update", {"weight_version": version_id})

    async def resume(self, version_id: str) -> None:
        """See `FleetGenerator.resume`."""
        holding = await self.holds()
        if not holding.certain or holding.version_id != version_id:
            raise StateError(f"version {version_id} can't be served: {self.url} holds {holding}")
        await self._post("resume")

    async def abort(self, version_id: str, *, back_to: str | None) -> None:
        """See `FleetGenerator.abort`; going back is another update.

        Raises:
            StateError: there is no version to go back to, or it can't be installed any more.
        """
        holding = await self.holds()
        if not holding.certain or (holding.version_id == version_id and version_id != back_to):
            if back_to is None:
                raise StateError(f"{self.url} holds {holding}, and there is no version to go back to")
            await self.install(back_to, hold_s=0.0)
            await self.resume(back_to)
        elif holding.held:
            await self._post("resume")

    async def holds(self) -> Holding:
        """See `FleetGenerator.holds`."""
        label = (await self._get("weight_info")).get("weight_version")
        paused = (await self._get("is_paused")).get("is_paused")
        if not isinstance(label, str) or not isinstance(paused, bool):
            raise PeerError(f"{self.url}: expected a weight_version and is_paused, got {label!r}, {paused!r}")
        certain = not label.startswith(_UNCERTAIN)
        version_id = label.removeprefix(_UNCERTAIN)
        return Holding(None if version_id == _NEVER_UPDATED else version_id, certain=certain, held=paused)

    async def _of_ranks(self, method: str, version_id: str) -> list[str]:
        """What a method of the worker extension answers on each rank."""
        body = {"method": method, "args": [version_id]}
        answer = self._object(
            "collective_rpc", await self._call("POST", "collective_rpc", body, self._timeout_s)
        )
        results = answer.get("results")
        if not isinstance(results, list) or not results:
            raise PeerError(f"{self.url}/collective_rpc: expected an answer of each rank, got {results!r}")
        return [str(each) for each in results]

    async def _begin_session(self) -> None:
        """Open a session, or go on with one that is open: that of a dead orchestrator, or of a failed update.

        Where there is none for another reason, the update that follows says so.
        """
        with contextlib.suppress(StateError):
            await self._post("start_weight_update")

    async def _is_intact(self) -> bool:
        """Whether a failed update wrote nothing: our backend doesn't end a session otherwise."""
        try:
            await self._begin_session()
            await self._post("finish_weight_update", {})
        except ModelExpressError:
            return False
        return True

    async def _label(self, label: str) -> None:
        await self._post("update_weight_version", {"new_version": label})

    async def _get(self, path: str) -> Mapping[str, Any]:
        return self._object(path, await self._call("GET", path, None, self._timeout_s))

    async def _post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> None:
        await self._call("POST", path, body or {}, timeout_s or self._timeout_s)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        url = f"{self.url}/{path}"
        return await http_json.call(method, url, body, timeout_s=timeout_s, headers=self._headers)

    def _object(self, path: str, answer: object) -> Mapping[str, Any]:
        if not isinstance(answer, dict):
            raise PeerError(f"{self.url}/{path}: expected a JSON object, got {type(answer).__name__}")
        return answer


def _failure(standing: str, what: str) -> ModelExpressError:
    """What a rank says of its failure, as an error of a class that says whether to try again."""
    kind = getattr(errors, standing.partition(":")[0], None)
    words = f"{what}: {standing}"
    if kind is VersionGone:
        return VersionGone(words)
    if isinstance(kind, type) and issubclass(kind, TryAgainError):
        return TryAgainError(words)
    return StateError(words)
