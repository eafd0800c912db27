"""An outage of the store is told in the log, not once for every call of a fleet."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from modelexpress_rl.server import answers
from modelexpress_rl.server.answers import Sparingly
from modelexpress_rl.server.stores.port import Stopping, StoreUnavailable


def test_one_line_of_a_kind_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    sparingly = Sparingly(10.0, now=lambda: now_s)
    for number in range(50):
        sparingly.warning(f"full {number}", kind="full")
    sparingly.warning("locked", kind="locked")
    now_s = 10.0
    sparingly.warning("full still", kind="full")
    now_s = 20.0
    sparingly.warning("full again", kind="full")
    assert caplog.messages == ["full 0", "locked", "full still (and 49 like it before)", "full again"]


@pytest.mark.anyio
async def test_every_call_is_answered_and_few_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Aborted(Exception):
        pass

    class Context:
        def time_remaining(self) -> None:
            return None

        async def abort(self, code: grpc.StatusCode, details: str) -> None:
            raise Aborted(code, details)

    async def answer(error: Exception) -> tuple[Any, ...]:
        @answers.unary
        async def handler(self: Any, request: Any, context: Any) -> None:
            raise error

        with pytest.raises(Aborted) as aborted:
            await handler(None, None, Context())
        return aborted.value.args

    monkeypatch.setattr(answers, "_outages", Sparingly(10.0))
    for _ in range(20):
        assert await answer(StoreUnavailable("disk is full")) == (grpc.StatusCode.UNAVAILABLE, "disk is full")
        await answer(Stopping("stopping"))
    assert caplog.messages == ["handler: disk is full"]
