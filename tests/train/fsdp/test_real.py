"""Real FSDP2 ranks on gloo: refits of a generator over NIXL, and 2-D meshes; compared with full tensors."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from modelexpress_rl.server.app import serving
from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.version import VersionState
from tests.e2e.processes import Running
from tests.train.fsdp.cases import COPY_MODES, STEPS
from tests.train.fsdp.real_ranks import ranks
from tests.train.fsdp.support import assemble, differing

pytestmark = [pytest.mark.anyio, pytest.mark.heavy]
WAIT_S = 60.0


class Twin(torch.nn.Module):
    """A module with these tensors by their names, all zero: what a generator serves."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            owner: torch.nn.Module = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            if tensor.is_floating_point():
                owner.register_parameter(last, torch.nn.Parameter(torch.zeros_like(tensor)))
            else:
                owner.register_buffer(last, torch.zeros_like(tensor))


class Refits:
    """A control plane, two ranks that train, and generators in this process."""

    def __init__(self, address: str, folder: Path, processes: list[Running]) -> None:
        self.address, self.folder, self.processes = address, folder, processes

    async def follow(self, case: str, steps: int) -> list[dict[str, torch.Tensor]]:
        """Refit a generator to each version of a case; answers the references, which it equals."""
        references = []
        async with contextlib.AsyncExitStack() as stack:
            control = await stack.enter_async_context(AsyncModelExpressControlClient.connect(self.address))
            twin: Any = None
            for step in range(steps):
                version = f"{case}-{step}"
                await self._ready(control, version)
                reference = torch.load(self.folder / f"{version}.pt")
                if twin is None:
                    twin = Twin(reference)
                    generator = await stack.enter_async_context(await self._generator(twin, case))
                await generator.apply_weight(await generator.stage_weight(version))
                assert differing(dict(twin.state_dict()), reference) == []
                await control.delete_weight_version(version)
                references.append(reference)
        return references

    async def _ready(self, control: AsyncModelExpressControlClient, version: str) -> None:
        try:
            await control.wait_for_state(version, VersionState.READY, timeout=WAIT_S, wait_for_creation=True)
        except TimeoutError as error:
            raise AssertionError("\n".join(process.text for process in self.processes)) from error

    async def _generator(self, twin: Twin, case: str) -> AsyncModelExpressGeneratorClient:
        return await AsyncModelExpressGeneratorClient.initialize(
            ModelExpressGeneratorConfig(
                engine_context=TorchGeneratorContext(twin),
                model_name=case,
                server_url=self.address,
                rpc_timeout_seconds=10.0,
            )
        )


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl isn't installed")
async def test_two_ranks_refit_a_generator_after_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    store = MemoryStore()
    async with serving(store) as plane:
        with ranks(2, "refit", str(tmp_path), plane.address) as processes:
            refits = Refits(plane.address, tmp_path, processes)
            for case in ("in-place", *(f"copied-{mode}" for mode in COPY_MODES), "overlapped"):
                references = await refits.follow(case, STEPS)
                unchanged = [
                    name
                    for name in references[0]
                    if not differing({name: references[0][name]}, {name: references[1][name]})
                ]
                assert unchanged == [], "a transfer that did nothing would pass"
            for mode in ("IN_PLACE", *COPY_MODES):
                await refits.follow(f"nothing-{mode}", 2)
            for process in processes:
                assert await anyio.to_thread.run_sync(process.wait, WAIT_S) == 0, process.text
                assert "Warning" not in process.text
    await store.close()


async def test_four_ranks_on_a_2_d_mesh(tmp_path: Path) -> None:
    with ranks(4, "mesh", str(tmp_path)) as processes:
        for process in processes:
            assert await anyio.to_thread.run_sync(process.wait, WAIT_S) == 0, process.text
    dumps = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(4)]
    for case in ("tp", "hsdp"):
        assert [dump[case]["slot"] for dump in dumps] == [f"publisher:global-rank:{r}" for r in range(4)]
        for step in range(2):
            reference = dumps[0][case]["steps"][step][1]
            assert differing(assemble(dump[case]["steps"][step][0] for dump in dumps), reference) == []
        before, after = (reference for _, reference in dumps[0][case]["steps"])
        assert [n for n in before if not differing({n: before[n]}, {n: after[n]})] == []
    placements = " ".join(dumps[0]["tp"]["placements"].values())
    assert "_StridedShard" in placements
    assert "Shard(dim=1)" in placements
