"""Arenas: memory on the host or on a GPU that the copy modes put versions into, and where what lies."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.transport.port import Region

_log = logging.getLogger(__name__)

ALIGN_BYTES = 64
Device: TypeAlias = tuple[str, int]
HOST: Device = ("cpu", 0)


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where each of several things goes, in bytes from the start of an arena of `size_bytes`."""

    offsets: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(cls, sizes_bytes: Iterable[int]) -> ArenaLayout:
        """One after another, each at a multiple of `ALIGN_BYTES`, which every dtype is content with."""
        offsets, end = [], 0
        for size_bytes in sizes_bytes:
            offsets.append(end)
            end += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return cls(tuple(offsets), end)


class Memory(Protocol):
    """One allocation of a generation, on one device."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def addr(self) -> int: ...

    @property
    def region(self) -> Region: ...

    @property
    def owner(self) -> Any:
        """What keeps it alive: an array on the host, a torch tensor on a GPU."""
        ...

    def part(self, at: int, size_bytes: int) -> Any:
        """A piece of it to write into: an array on the host, a flat torch tensor of bytes on a GPU."""
        ...


class HostMemory:
    """Page-aligned host memory; in huge pages where the kernel has them."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(mmap.PAGESIZE, size_bytes)
        self._map = mmap.mmap(-1, self.size_bytes)
        with contextlib.suppress(AttributeError, OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._is_pinned = False
        self.owner: NDArray[np.uint8] = self._array.view()
        self.owner.flags.writeable = False  # whoever writes it asks the generation

    @property
    def addr(self) -> int:
        """Where the memory begins."""
        return self._array.ctypes.data

    @property
    def region(self) -> Region:
        """All of it."""
        return Region(self.addr, self.size_bytes)

    def part(self, at: int, size_bytes: int) -> NDArray[np.uint8]:
        """See `Memory`."""
        return self._array[at : at + size_bytes]

    def pin(self) -> None:
        """Lock its pages for CUDA, so that copies from a GPU run beside the host: slower without."""
        code = int(_cuda_runtime().cudaHostRegister(self.addr, self.size_bytes, 0))
        self._is_pinned = code == 0
        if code:
            _log.warning("CUDA did not pin %d bytes: error %d", self.size_bytes, code)

    def unpin(self) -> None:
        """Undo `pin`; before the memory goes."""
        if self._is_pinned:
            self._is_pinned = False
            _cuda_runtime().cudaHostUnregister(self.addr)


class DeviceMemory:
    """Memory of a GPU, from torch's allocator."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        import torch

        self._device = device
        self.owner = torch.empty(max(1, size_bytes), dtype=torch.uint8, device=torch.device(*device))

    @property
    def size_bytes(self) -> int:
        """Bytes of it."""
        return int(self.owner.numel())

    @property
    def addr(self) -> int:
        """Where the memory begins."""
        return self.owner.data_ptr()

    @property
    def region(self) -> Region:
        """All of it."""
        return Region(self.addr, self.size_bytes, *self._device)

    def part(self, at: int, size_bytes: int) -> Any:
        """See `Memory`."""
        return self.owner[at : at + size_bytes]


def _cuda_runtime() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.cudart()


def memory_on(device: Device, size_bytes: int, *, pinned: bool = False) -> HostMemory | DeviceMemory:
    """Allocate memory on a device; on the host `pinned` for copies from a GPU."""
    if device != HOST:
        return DeviceMemory(device, size_bytes)
    memory = HostMemory(size_bytes)
    if pinned:
        memory.pin()
    return memory
