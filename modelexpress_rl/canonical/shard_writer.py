"""A safetensors file that is made while its sizes aren't known yet: bodies go to a spool, the header is last.

Nothing but one part of a body is in memory; the spool is a temporary file without a name, which a crash
leaves nothing of.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from modelexpress_rl.canonical.tensor_file import WORD_BYTES, make_header
from modelexpress_rl.errors import UsageError

PART_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Body:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


class ShardWriter:
    """Collects tensors, then hands out the file's bytes, as often as they are asked for.

    `close` it, or use it as a context manager. Not for several threads at once.
    """

    def __init__(self, spool_dir: Path | None = None) -> None:
        self._spool = tempfile.TemporaryFile(dir=spool_dir)  # noqa: SIM115 (closed by close)
        self._bodies: dict[str, _Body] = {}
        self._checksums: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """The tensors so far."""
        return list(self._bodies)

    @property
    def body_bytes(self) -> int:
        """How many bytes the tensors have so far."""
        return sum(body.size_bytes for body in self._bodies.values())

    def add(
        self,
        name: str,
        parts: Iterable[bytes | memoryview],
        *,
        dtype: str = "U8",
        shape: tuple[int, ...] | None = None,
        checksum: str | None = None,
        keep: Callable[[], bool] = lambda: True,
    ) -> int:
        """Append a tensor; returns its bytes. Without a shape it is one-dimensional.

        `keep` is asked when all parts have come: a tensor that turns out to be of no use is dropped again.

        Raises:
            UsageError: one of that name is there already.
            OSError: the spool's disk is full; the writer is of no use any more.
        """
        if name in self._bodies:
            raise UsageError(f"tensor {name!r} is given twice")
        begin = self._spool.seek(0, 2)
        for part in parts:
            self._spool.write(part)
        size = self._spool.tell() - begin
        if not keep():
            self._spool.truncate(begin)
            return 0
        self._bodies[name] = _Body(name, dtype, (size,) if shape is None else shape, begin, size)
        if checksum is not None:
            self._checksums[name] = checksum
        return size

    def parts(self, first: Mapping[str, bytes] | None = None) -> Iterator[bytes]:
        """The file's bytes, some MiB at a time; tensors of `first` precede the others."""
        first = first or {}
        # The widest type first, so that every tensor is aligned to its own type.
        bodies = sorted(self._bodies.values(), key=lambda body: (-WORD_BYTES[body.dtype], body.name))
        listed: list[tuple[str, str, tuple[int, ...], int]] = [
            (name, "U8", (len(data),), len(data)) for name, data in first.items()
        ]
        listed += [(body.name, body.dtype, body.shape, body.size_bytes) for body in bodies]
        yield make_header(listed, dict(sorted(self._checksums.items())))
        yield from first.values()
        for body in bodies:
            for begin in range(0, body.size_bytes, PART_BYTES):
                self._spool.seek(body.begin + begin)
                yield self._spool.read(min(PART_BYTES, body.size_bytes - begin))

    def close(self) -> None:
        """Give the spool back."""
        self._spool.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
