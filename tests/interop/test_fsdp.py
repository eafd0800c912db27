"""0.7.0's generator client reads versions of our FSDP trainer, two real ranks, over NIXL."""

from __future__ import annotations

from pathlib import Path

import anyio.to_thread
import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.server.app import Running as Plane
from modelexpress_rl.version import VersionState
from tests.interop.peers import Pool
from tests.interop.test_generator import engine_holds
from tests.train.fsdp.real_ranks import ranks

pytestmark = [pytest.mark.anyio, pytest.mark.heavy]
WAIT_S = 60.0


async def test_sharded_tensors_and_a_rank_that_holds_nothing(
    pool: Pool, plane: Plane, tmp_path: Path
) -> None:
    [peer] = pool.take("peer_generator.py")
    async with AsyncModelExpressControlClient.connect(plane.address) as control:
        with ranks(2, "peer", str(tmp_path), plane.address) as processes:
            for case in ("peer-sharded", "peer-nothing"):
                await peer.acall("start", address=plane.address, model=case)
                for step in range(2):
                    version = f"{case}-{step}"
                    await control.wait_for_state(
                        version, VersionState.READY, timeout=WAIT_S, wait_for_creation=True
                    )
                    await peer.acall("stage", version=version)
                    assert await peer.acall("apply")
                    assert await peer.acall("holds") == engine_holds(step)
                    await peer.acall("release")
                    await control.delete_weight_version(version)
                await peer.acall("close")
            for process in processes:
                assert await anyio.to_thread.run_sync(process.wait, WAIT_S) == 0, process.text
