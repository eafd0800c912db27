"""Files that are there entirely or not at all, also after a crash; and locks that end with their process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import xxhash

from modelexpress_rl.errors import DeadlineExceeded, UsageError

_POLL_S = 0.02
_BLOCK_BYTES = 4 << 20
_MAX_PART_BYTES = 255


def as_one_part(name: str, what: str) -> str:
    """A name as exactly one part of a path, percent-quoted; also "." and ".." are.

    Raises:
        UsageError: it is empty, or longer than a file system takes.
    """
    part = quote(name, safe="")
    if set(part) <= {"."}:
        part = part.replace(".", "%2E")
    if not part or len(part) > _MAX_PART_BYTES:
        raise UsageError(f"{what} must be of 1 to {_MAX_PART_BYTES} bytes when quoted, not {name!r:.300}")
    return part


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write a document in one step: a crash leaves the one before, or this one."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    with open(written, "w") as file:
        json.dump(value, file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(written, path)
    sync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """A document that is an object; None where there is none, or something else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def digest_of(path: Path) -> str:
    """The xxh3-128 of a file, in hex.

    Raises:
        OSError: it can't be read.
    """
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return str(digest.hexdigest())


def removed(path: Path, trash: Path) -> None:
    """Take a folder out of sight in one step, then remove it; what is left of it is junk in `trash`."""
    trash.mkdir(parents=True, exist_ok=True)
    aside = trash / f"{path.name[:100]}.{os.getpid()}.{time.monotonic_ns()}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        sync_folder(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path, *, shared: bool, timeout_s: float) -> Iterator[None]:
    """Hold a lock on a file; the kernel lets go of it when its process ends, however that happens.

    Raises:
        DeadlineExceeded: somebody else held it for all of `timeout_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        end = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    wanted = "be read" if shared else "be changed"
                    raise DeadlineExceeded(
                        f"{path.name}: another process kept it for {timeout_s} s, it can't {wanted}"
                    ) from None
                time.sleep(_POLL_S)
        os.utime(path)  # when it was used last, for eviction
        yield
    finally:
        os.close(handle)
