"""The memory under source boxes: merged into extents, seen as bytes, copied off the event loop."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.errors import UsageError
from modelexpress_rl.train.adapter import SourceBox
from modelexpress_rl.transport.port import Region

COPY_CHUNK_BYTES = 32 << 20
Job = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous piece of memory that boxes lie in; `owner` is that of its first box."""

    addr: int
    size_bytes: int
    device_kind: str
    device_index: int
    owner: Any = field(default=None, compare=False, repr=False)

    @property
    def region(self) -> Region:
        """The same, as the transport wants it."""
        return Region(self.addr, self.size_bytes, self.device_kind, self.device_index)


def extents_of(boxes: Iterable[SourceBox]) -> tuple[Extent, ...]:
    """The memory of these boxes without overlaps, by address; neighbours in one allocation are joined.

    Several names of the same memory, and the pieces of one fused tensor, so become one extent.
    """
    held = [box for box in boxes if box.size_bytes and box.block is None]
    held.sort(key=lambda box: (box.device_kind, box.device_index, box.addr, box.size_bytes))
    extents: list[Extent] = []
    for box in held:
        last = extents[-1] if extents else None
        if last is not None and _joins(last, box):
            end = max(last.addr + last.size_bytes, box.addr + box.size_bytes)
            extents[-1] = Extent(last.addr, end - last.addr, last.device_kind, last.device_index, last.owner)
        else:
            extents.append(Extent(box.addr, box.size_bytes, box.device_kind, box.device_index, box.owner))
    return tuple(extents)


def spans_of(extents: Iterable[Extent]) -> tuple[Region, ...]:
    """What to register so that these extents can be read: of each allocation one span, not many pieces.

    A span reaches from the first to the last extent in an allocation, where at least half of it is theirs;
    where less is, or the allocation is not known, the extents stand for themselves. Fewer regions register
    faster, and make smaller metadata.
    """
    together: dict[tuple[str, int, int], list[Extent]] = {}
    for number, extent in enumerate(extents):
        allocation = _allocation(extent.owner)
        key = -1 - number if allocation is None else allocation
        together.setdefault((extent.device_kind, extent.device_index, key), []).append(extent)
    spans: list[Region] = []
    for (kind, index, _), inside in together.items():
        begin = min(extent.addr for extent in inside)
        size_bytes = max(extent.addr + extent.size_bytes for extent in inside) - begin
        if 2 * sum(extent.size_bytes for extent in inside) >= size_bytes:
            spans.append(Region(begin, size_bytes, kind, index))
        else:
            spans += [extent.region for extent in inside]
    return tuple(spans)


def _joins(last: Extent, box: SourceBox) -> bool:
    if (last.device_kind, last.device_index) != (box.device_kind, box.device_index):
        return False
    end = last.addr + last.size_bytes
    return box.addr < end or (box.addr == end and _allocation(last.owner) == _allocation(box.owner) != None)  # noqa: E711


def _allocation(owner: Any) -> int | None:
    storage = getattr(owner, "untyped_storage", None)
    return None if storage is None else int(storage().data_ptr())


def host_bytes(addr: int, size_bytes: int) -> NDArray[np.uint8]:
    """Memory of this process as an array; whoever owns it must outlive the array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(addr))


def bytes_of(addr: int, size_bytes: int, device_kind: str, owner: Any) -> NDArray[np.uint8]:
    """A piece of memory as an array on the host: a view on a CPU, a copy from a GPU."""
    if device_kind == "cpu":
        return host_bytes(addr, size_bytes)
    array: NDArray[np.uint8] = torch_bytes(addr, size_bytes, owner).cpu().numpy()
    return array


def copies_to_host(extents: Sequence[Extent], targets: Sequence[NDArray[np.uint8]]) -> list[Job]:
    """What has to be done to copy every extent of a CPU into its target, in any order, by any threads."""
    return [
        partial(_copy, extent, target, begin, min(COPY_CHUNK_BYTES, extent.size_bytes - begin))
        for extent, target in zip(extents, targets, strict=True)
        for begin in range(0, extent.size_bytes, COPY_CHUNK_BYTES)
    ]


def copy_on_stream(extent: Extent, target: Any) -> None:
    """Queue the copy of a GPU's extent into an array on the host, or a tensor on a GPU."""
    import torch  # only an engine that has tensors on a GPU comes here

    source = torch_bytes(extent.addr, extent.size_bytes, extent.owner)
    into = target if isinstance(target, torch.Tensor) else torch.from_numpy(target)
    into.copy_(source, non_blocking=True)


def run_all(jobs: Sequence[Job], threads: int, wanted: Callable[[], bool] = lambda: True) -> bool:
    """Do all jobs and return True when the last is done, or False as soon as they are wanted no more.

    Run it in a thread. Returns, or raises, only once nothing is being done any more.
    """
    left = deque(jobs)

    def work() -> None:
        while wanted():
            try:
                job = left.popleft()
            except IndexError:
                return
            job()

    if threads > 1 and len(jobs) > 1:
        with ThreadPoolExecutor(min(threads, len(jobs)), thread_name_prefix="mx-copy") as pool:
            for done in [pool.submit(work) for _ in range(min(threads, len(jobs)))]:
                done.result()
    else:
        work()
    return not left and wanted()


def _copy(extent: Extent, target: NDArray[np.uint8], begin: int, size_bytes: int) -> None:
    np.copyto(target[begin : begin + size_bytes], host_bytes(extent.addr + begin, size_bytes))


def torch_bytes(addr: int, size_bytes: int, owner: Any) -> Any:
    """Memory of a GPU as a flat torch tensor of bytes.

    Raises:
        UsageError: `owner` is no torch tensor.
    """
    import torch

    if not isinstance(owner, torch.Tensor):
        raise UsageError(
            f"memory at {addr} is not the CPU's: its owner must be a torch tensor, got {type(owner).__name__}"
        )
    storage = owner.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=owner.device)
    return whole.set_(storage, addr - storage.data_ptr(), (size_bytes,), (1,))
