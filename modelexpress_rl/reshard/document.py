"""Small documents that this package writes and reads again: whole, bounded, and of a format that is known."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

from modelexpress_rl.errors import UsageError


def read_document(data: bytes | str, *, format_number: int, max_bytes: int) -> dict[str, Any]:
    """Read an object whose field `format` is `format_number`; its other fields are the caller's to check.

    Raises:
        UsageError: it is longer than `max_bytes`, no JSON, no object, or of another format.
    """
    if len(data) > max_bytes:
        raise UsageError(f"expected at most {max_bytes} bytes, got {len(data)}")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is no JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != format_number:
        raise UsageError(f"expected an object with format {format_number}")
    return document


def write_document(path: Path, text: str) -> None:
    """Write a file in one step: whoever reads it finds the former one or this, and a failure leaves nothing.

    Raises:
        OSError: it can't be written, or what is there is no regular file, such as a device.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is there and no regular file", str(path))
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", errors="replace")
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
