"""0.7.0's clients where something is demanded: their token is ours, and what they can't show is named."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from modelexpress_rl.server.security import ServerSecurity
from tests.interop.peers import Pool, Raised
from tests.security.job import SLOT, opened

pytestmark = [pytest.mark.anyio, pytest.mark.heavy]

VERSION = {
    "method": "create_weight_version",
    "model_name": "m",
    "idempotency_key": "k",
    "payload_format": "FULL_TENSOR",
    "uid": "v",
    "expected_source_slots": ["s"],
}


@pytest.mark.parametrize(
    ("sent", "refusal"),
    [
        ("secret\n", None),
        ("wrong", "the bearer token is not one that is accepted"),
        ("", "a bearer token is required: none came"),
    ],
)
async def test_the_token_of_its_variable(
    pool: Pool, token_file: Path, tmp_path: Path, sent: str, refusal: str | None
) -> None:
    accepted = tmp_path / "accepted"
    accepted.write_text("other\nsecret\n")
    await anyio.Path(token_file).write_text(sent)
    async with opened(ServerSecurity.of(token_file=accepted)) as job:
        [peer] = await pool.atake("peer_control.py")
        await peer.acall("connect", address=job.plane.address)
        assert await peer.acall("health", service="model_express.refit.RefitService") == 1
        if refusal is None:
            assert (await peer.acall("control", **VERSION))["version_id"] == "v"
            return
        with pytest.raises(Raised, match=refusal) as caught:
            await peer.acall("control", **VERSION)
        assert caught.value.code == "UNAUTHENTICATED"


async def test_a_manifest_where_a_lease_is_demanded(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    monkeypatch.setenv("MX_MANIFEST_REQUIRE_LEASE", "1")
    async with opened() as job:
        trainer = await job.trainer()
        await job.publish(trainer, "v1", 1.0)
        [peer] = await pool.atake("peer_control.py")
        await peer.acall("connect", address=job.plane.address)
        with pytest.raises(Raised, match=r"MX_MANIFEST_REQUIRE_LEASE\), and the call names none") as caught:
            await peer.acall(
                "raw",
                rpc="GetWeightVersionShardManifest",
                request={"version_id": "v1", "source_slot_id": SLOT},
                endpoint=trainer.worker_endpoint,
            )
        assert caught.value.code == "PERMISSION_DENIED"
