"""The index of a version: which file holds which tensor, and what the version is a change of."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from modelexpress_rl.canonical.tensor_file import parse_object
from modelexpress_rl.errors import ObjectError, UsageError

INDEX_NAME = "model.safetensors.index.json"
_PLAIN = re.compile(r"[^/\\\x00-\x1f\x7f]{1,200}\.safetensors", re.DOTALL)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Encoding(StrEnum):
    """How a version's tensors are stored."""

    FULL = "full"  # themselves
    XOR = "xor"  # 0.7.0's deltas: one zstd frame for each tensor
    SPARSE = "sparse"  # ours: chunks that decode and verify alone


_CHECKSUM = {Encoding.FULL: "adler32", Encoding.XOR: "adler32", Encoding.SPARSE: "xxh3_128"}


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a file, up to and with its directory: how long it is, and its digest."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Index:
    """`version` and `base_version` are those of a delta, `total_size_bytes` is a full checkpoint's.

    `prefixes` has one entry for each file of a sparse delta.
    """

    encoding: Encoding
    weight_map: Mapping[str, str]
    version: str | None = None
    base_version: str | None = None
    total_size_bytes: int | None = None
    prefixes: Mapping[str, Prefix] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The names of the files, sorted."""
        return sorted(set(self.weight_map.values()))


def shard_name(number: int, count: int) -> str:
    """The name of a shard file: deltas count from 0, full checkpoints from 1."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(index: Index) -> bytes:
    """Compact JSON with sorted keys, as 0.7.0 writes it."""
    metadata: dict[str, Any] = {"checksum_format": _CHECKSUM[index.encoding]}
    if index.encoding is Encoding.FULL:
        if index.total_size_bytes is None:
            raise UsageError("total_size_bytes must be given for a full checkpoint")
        metadata["total_size"] = index.total_size_bytes
    else:
        if not index.version or not index.base_version:
            raise UsageError(
                f"a delta has a version and a base_version, not {index.version!r} and {index.base_version!r}"
            )
        metadata |= {
            "version": index.version,
            "base_version": index.base_version,
            "delta_encoding": str(index.encoding),
            "compression_format": "zstd",
        }
    if index.encoding is Encoding.SPARSE:
        metadata["prefixes"] = {
            name: {"bytes": prefix.size_bytes, "sha256": prefix.sha256}
            for name, prefix in index.prefixes.items()
        }
    document = {"metadata": metadata, "weight_map": dict(index.weight_map)}
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def index_digest(data: bytes) -> str:
    """The sha256 of an index's bytes, as the record of a version carries it."""
    return hashlib.sha256(data).hexdigest()


def read_index(data: bytes, where: str, *, digest: str | None = None) -> Index:
    """An index, checked; `where` is its URI or path, `digest` what the version's record says of it.

    Raises:
        ObjectError: it is malformed, of an unknown encoding, names a file that is no plain name, or has
            another digest.
    """
    if digest is not None and index_digest(data) != digest:
        raise ObjectError(f"{where}: expected an index of sha256 {digest}, got {index_digest(data)}")
    document = parse_object(data, f"{where}: the index")
    metadata, weight_map = document.get("metadata"), document.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise ObjectError(f"{where}: an index has the objects metadata and weight_map, not {set(document)}")
    for name, file in weight_map.items():
        if not is_plain_name(file):
            raise ObjectError(f"{where}: tensor {name!r} is in {file!r:.300}, which is no plain file name")
    encoding = _encoding(metadata, where)
    _expect(metadata, "checksum_format", _CHECKSUM[encoding], where)
    if encoding is Encoding.FULL:
        size = metadata.get("total_size")
        if type(size) is not int or size < 0:
            raise ObjectError(f"{where}: total_size must be a count of bytes, not {size!r:.100}")
        return Index(encoding, weight_map, total_size_bytes=size)
    _expect(metadata, "compression_format", "zstd", where)
    prefixes = _prefixes(metadata.get("prefixes"), weight_map, where) if encoding is Encoding.SPARSE else {}
    version, base = (_text(metadata, key, where) for key in ("version", "base_version"))
    return Index(encoding, weight_map, version, base, prefixes=prefixes)


def check_is(index: Index, version: str, base_version: str | None, where: str) -> None:
    """That an index is of the version that the control plane names, on the base that it names.

    Raises:
        ObjectError: it is of another.
    """
    if index.encoding is Encoding.FULL:
        if base_version is not None:
            raise ObjectError(f"{where}: expected a delta on {base_version!r}, got a full checkpoint")
        return
    if (index.version, index.base_version) != (version, base_version):
        raise ObjectError(
            f"{where}: expected version {version!r} on base {base_version!r}, "
            f"got {index.version!r} on {index.base_version!r}"
        )


def is_plain_name(name: Any) -> bool:
    """Whether a file of that name is a sibling of its index, and nothing else."""
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None and name.isprintable()


def _encoding(metadata: dict[str, Any], where: str) -> Encoding:
    stated = metadata.get("delta_encoding", Encoding.FULL)
    if stated == Encoding.FULL and ("delta_encoding" in metadata or "base_version" in metadata):
        raise ObjectError(f"{where}: a delta's delta_encoding must be xor or sparse, not {stated!r}")
    try:
        return Encoding(stated)
    except ValueError:
        raise ObjectError(f"{where}: delta_encoding must be xor or sparse, not {stated!r:.100}") from None


def _text(metadata: dict[str, Any], key: str, where: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str) or not value:
        raise ObjectError(f"{where}: {key} must be a non-empty string, not {value!r:.100}")
    return value


def _expect(metadata: dict[str, Any], key: str, expected: str, where: str) -> None:
    if metadata.get(key) != expected:
        raise ObjectError(f"{where}: {key} must be {expected!r}, not {metadata.get(key)!r:.100}")


def _prefixes(value: Any, weight_map: dict[str, str], where: str) -> dict[str, Prefix]:
    files = set(weight_map.values())
    if not isinstance(value, dict) or set(value) != files:
        raise ObjectError(
            f"{where}: prefixes must be of the files {sorted(files)!r:.300}, not {value!r:.300}"
        )
    return {name: _prefix(entry, f"{where}: prefix of {name}") for name, entry in value.items()}


def _prefix(entry: Any, where: str) -> Prefix:
    if not isinstance(entry, dict) or set(entry) != {"bytes", "sha256"}:
        raise ObjectError(f"{where}: expected bytes and sha256, got {entry!r:.200}")
    size, digest = entry["bytes"], entry["sha256"]
    if type(size) is not int or size < 8:
        raise ObjectError(f"{where}: bytes must be a count of at least 8, not {size!r:.100}")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ObjectError(f"{where}: sha256 must be 64 hex digits, not {digest!r:.100}")
    return Prefix(size, digest)
