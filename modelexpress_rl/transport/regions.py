"""Which memory an agent has registered: disjoint regions, counted by how many registrations use them.

Transports look a run up by the region that starts last before it, so overlapping regions hide each
other: with [0, 64) and [16, 32) registered, NIXL 1.5.1 no longer finds [40, 44). Hence one table that
keeps them disjoint, for every adapter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.transport.port import Region, Registration

DEVICE_KINDS = ("cpu", "cuda")
Device = tuple[str, int]


class RegionTable:
    """The registered regions of one agent, and who holds them."""

    def __init__(self) -> None:
        self._devices: dict[Device, _DeviceTable] = {}
        self._held: dict[int, list[Region]] = {}
        self._tokens = count(1)

    def missing(self, regions: Sequence[Region]) -> list[Region]:
        """The disjoint regions that must be registered anew so that `regions` are covered.

        Raises:
            UsageError: a region is empty, or of an unknown kind of device.
            StateError: a region overlaps registered memory in part.
        """
        return [each for each in _disjoint(regions) if self._table(each).holder(each) is None]

    def add(self, regions: Sequence[Region]) -> Registration:
        """Record that `regions` are registered; what `missing` named has been registered before."""
        held = []
        for region in _disjoint(regions):
            table = self._table(region)
            holder = table.holder(region)
            if holder is None:
                table.insert(region)
                holder = region
            table.uses[holder.addr] += 1
            held.append(holder)
        token = next(self._tokens)
        self._held[token] = held
        return Registration(token, tuple(regions))

    def last_uses(self, registration: Registration) -> list[Region]:
        """The regions that only `registration` still uses; none if it was removed before."""
        uses: dict[Region, int] = {}
        for region in self._held.get(registration.token, []):
            uses[region] = uses.get(region, 0) + 1
        return [each for each, mine in uses.items() if self._table(each).uses[each.addr] == mine]

    def remove(self, registration: Registration) -> None:
        """Forget a registration, and the regions that nobody uses any more."""
        for region in self._held.pop(registration.token, []):
            table = self._table(region)
            table.uses[region.addr] -= 1
            if not table.uses[region.addr]:
                table.delete(region)

    def all(self) -> list[Region]:
        """Every registered region, once."""
        return [region for table in self._devices.values() for region in table.regions]

    def uncovered(self, device: Device, addr: NDArray[np.uint64], size: NDArray[np.uint64]) -> int | None:
        """The index of the first run that doesn't lie inside one registered region; None if all do."""
        outside = ~self._devices.get(device, _DeviceTable()).covers(addr, size)
        return int(outside.argmax()) if outside.any() else None

    def _table(self, region: Region) -> _DeviceTable:
        return self._devices.setdefault((region.device_kind, region.device_index), _DeviceTable())


class _DeviceTable:
    """Disjoint regions of one device, sorted by address."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.regions: list[Region] = []
        self.uses: dict[int, int] = {}
        self._columns: tuple[NDArray[np.uint64], NDArray[np.uint64]] | None = None

    def holder(self, region: Region) -> Region | None:
        """The region that contains `region`, or None where nothing overlaps it."""
        after = bisect_right(self.starts, region.addr)
        end = region.addr + region.size_bytes
        if after and _end(self.regions[after - 1]) > region.addr:
            before = self.regions[after - 1]
            if _end(before) >= end:
                return before
            raise _overlap(region, before)
        if after < len(self.starts) and self.starts[after] < end:
            raise _overlap(region, self.regions[after])
        return None

    def insert(self, region: Region) -> None:
        at = bisect_right(self.starts, region.addr)
        self.starts.insert(at, region.addr)
        self.regions.insert(at, region)
        self.uses[region.addr] = 0
        self._columns = None

    def delete(self, region: Region) -> None:
        at = bisect_right(self.starts, region.addr) - 1
        del self.starts[at], self.regions[at], self.uses[region.addr]
        self._columns = None

    def covers(self, addr: NDArray[np.uint64], size: NDArray[np.uint64]) -> NDArray[np.bool_]:
        if not self.regions:
            return np.equal(size, 0)
        if self._columns is None:
            ends = np.array([_end(each) for each in self.regions], np.uint64)
            self._columns = np.array(self.starts, np.uint64), ends
        starts, ends = self._columns
        before = np.searchsorted(starts, addr, side="right") - 1
        found = before >= 0
        last = ends[np.maximum(before, 0)]
        # Subtracted rather than added: a hostile address near 2**64 must not wrap around.
        inside: NDArray[np.bool_] = found & (addr <= last) & (size <= last - np.minimum(addr, last))
        return np.logical_or(inside, np.equal(size, 0))


def _disjoint(regions: Iterable[Region]) -> list[Region]:
    """Unite regions that overlap (not those that only touch), sorted by device and address."""
    united: list[Region] = []
    for region in sorted(regions, key=lambda r: (r.device_kind, r.device_index, r.addr)):
        _check(region)
        last = united[-1] if united else None
        if last is None or not _same_device(last, region) or region.addr >= _end(last):
            united.append(region)
        elif _end(region) > _end(last):
            size_bytes = _end(region) - last.addr
            united[-1] = Region(last.addr, size_bytes, last.device_kind, last.device_index)
    return united


def _check(region: Region) -> None:
    if region.device_kind not in DEVICE_KINDS:
        raise UsageError(f"unknown device kind {region.device_kind!r}; expected one of {DEVICE_KINDS}")
    if region.addr <= 0 or region.size_bytes <= 0 or _end(region) > 2**64:
        raise UsageError(f"not a piece of memory: {region.size_bytes} bytes at address {region.addr:#x}")


def _same_device(left: Region, right: Region) -> bool:
    return (left.device_kind, left.device_index) == (right.device_kind, right.device_index)


def _end(region: Region) -> int:
    return region.addr + region.size_bytes


def _overlap(region: Region, registered: Region) -> StateError:
    return StateError(
        f"{region.size_bytes} bytes at {region.addr:#x} overlap, but do not lie inside, the registered "
        f"{registered.size_bytes} bytes at {registered.addr:#x}; deregister those first, or register the "
        "memory around both first"
    )
