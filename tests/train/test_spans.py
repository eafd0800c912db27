"""Registering few large spans of memory instead of many tensors."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest
import torch

from modelexpress_rl.errors import TransferError
from modelexpress_rl.timing import RefitTimings
from modelexpress_rl.train.adapter import SourceBox
from modelexpress_rl.train.memory import extents_of, spans_of
from modelexpress_rl.train.staging import Stager
from modelexpress_rl.transport.inprocess import Hub, InprocessAgent

pytestmark = pytest.mark.anyio

COUNT, BYTES = 50, 256


def boxes_every(stride: int) -> list[SourceBox]:
    """Tensors of 256 bytes in one allocation, each so many bytes after the one before."""
    storage = torch.arange(COUNT * stride, dtype=torch.int64).to(torch.uint8)
    return [box(f"t{i}", storage[i * stride : i * stride + BYTES]) for i in range(COUNT)]


def box(name: str, tensor: torch.Tensor) -> SourceBox:
    shape = tuple(tensor.shape)
    return SourceBox(
        name=name,
        dtype="torch.uint8",
        full_shape=shape,
        offset=(0,) * len(shape),
        shape=shape,
        addr=tensor.data_ptr(),
        size_bytes=tensor.nbytes,
        device_kind="cpu",
        device_index=0,
        owner=tensor,
    )


@pytest.mark.parametrize(("stride", "regions"), [(BYTES, 1), (BYTES + 64, 1), (3 * BYTES, COUNT)])
async def test_neighbours_in_one_allocation_are_one_region(stride: int, regions: int) -> None:
    agent = Hub().agent("trainer")
    stager = Stager(agent, with_digests=False)
    await stager.lend(boxes_every(stride), RefitTimings("trainer").begin("v1"))
    assert len(agent.table.all()) == regions
    await stager.aclose()
    assert not agent.table.all()


def test_allocations_stay_apart_and_unknown_ones_stand_for_themselves() -> None:
    several = [*boxes_every(300), *boxes_every(300)]
    assert len(spans_of(extents_of(several))) == 2
    nobodys = [replace(each, owner=None) for each in several]
    extents = extents_of(nobodys)
    assert spans_of(extents) == tuple(extent.region for extent in extents)


async def test_where_a_span_is_refused_the_tensors_are_registered_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = Hub().agent("trainer")
    register = InprocessAgent.register

    async def refuse_big(self, regions):  # type: ignore[no-untyped-def]
        if any(region.size_bytes > BYTES for region in regions):
            raise TransferError("not all of it can be pinned", peer=self.name)
        return await register(self, regions)

    monkeypatch.setattr(InprocessAgent, "register", refuse_big)
    stager = Stager(agent, with_digests=False)
    with anyio.fail_after(5):
        await stager.lend(boxes_every(300), RefitTimings("trainer").begin("v1"))
    assert len(agent.table.all()) == COUNT
    await stager.aclose()
