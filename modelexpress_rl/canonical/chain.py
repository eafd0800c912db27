"""A chain of versions as one: a full checkpoint or a base, and deltas of any encoding on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from modelexpress_rl.canonical.index import Encoding, Index
from modelexpress_rl.canonical.joining import advance
from modelexpress_rl.canonical.memory import Bytes
from modelexpress_rl.canonical.plain_files import FullTensor, Open, copy_full, read_full, read_xor
from modelexpress_rl.canonical.sparse import SparseTensor, read_sparse
from modelexpress_rl.canonical.xor import Frame, replay
from modelexpress_rl.errors import ObjectError


@dataclass(frozen=True, slots=True)
class Link:
    """One version of a chain, under the name that the control plane gives it."""

    version: str
    index: Index
    open_file: Open


class Chain:
    """Versions that follow each other, opened: every header is read and checked, and no tensor yet.

    What comes before the last full checkpoint isn't opened. `full` has that checkpoint's tensors, and is
    None where the chain begins with a delta on a base that the caller holds.

    Raises:
        ObjectError: a version is not a delta on the one before, or a file is malformed.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        for before, after in pairwise(links):
            if after.index.encoding is not Encoding.FULL and after.index.base_version != before.version:
                raise ObjectError(
                    f"version {after.version}: expected a delta on {before.version}, "
                    f"got one on {after.index.base_version}"
                )
        whole = [at for at, link in enumerate(links) if link.index.encoding is Encoding.FULL]
        first = whole[-1] if whole else 0
        self.full: dict[str, FullTensor] | None = None
        if whole:
            self.full = read_full(links[first].index, links[first].open_file)
            first += 1
        self._deltas: dict[str, list[Frame | SparseTensor]] = {}
        for link in links[first:]:
            opened = read_xor if link.index.encoding is Encoding.XOR else read_sparse
            for name, delta in opened(link.index, link.open_file).items():
                if self.full is not None and name not in self.full:
                    raise ObjectError(
                        f"version {link.version}: it changes tensor {name!r}, which its base lacks"
                    )
                self._deltas.setdefault(name, []).append(delta)

    @property
    def changed(self) -> frozenset[str]:
        """The tensors that a delta changes."""
        return frozenset(self._deltas)

    def size_bytes(self, name: str) -> int:
        """How many bytes rebuilding a tensor reads."""
        full = self.full[name].stored.size_bytes if self.full is not None else 0
        return full + sum(
            delta.end - delta.begin if isinstance(delta, Frame) else delta.entry.payload_bytes
            for delta in self._deltas.get(name, ())
        )

    def rebuild(self, name: str, base: Bytes | None, out: Bytes, *, threads: int | None = None) -> None:
        """Make a tensor of the last version in memory of its size: from the checkpoint, or from `base`.

        Deltas of one encoding that follow each other are one pass. Where it raises, `out` holds nothing of
        use.

        Raises:
            ObjectError: an object is malformed, or no base is given where one is needed.
            DigestMismatch: the bytes, or those of the base, are not what was published.
        """
        if self.full is not None:
            if name not in self.full:
                raise ObjectError(f"tensor {name!r} is not in the full checkpoint")
            copy_full(name, self.full[name], out)
        elif base is None:
            raise ObjectError(f"tensor {name!r}: the chain begins with a delta, and no base is given")
        elif base is not out:
            out[:] = base
        for _, group in groupby(self._deltas.get(name, ()), key=type):
            deltas = list(group)
            frames = [delta for delta in deltas if isinstance(delta, Frame)]
            tensors = [delta for delta in deltas if isinstance(delta, SparseTensor)]
            if frames:
                replay(name, out, frames, out)
            if tensors:
                if tensors[0].size_bytes != out.nbytes:
                    raise ObjectError(
                        f"{tensors[0].where}: expected {out.nbytes} bytes, it is of {tensors[0].size_bytes}"
                    )
                advance(tensors, out, out, threads=threads)
