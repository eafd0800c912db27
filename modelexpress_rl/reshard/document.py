"""Small JSON documents that this package writes and reads again: bounded, and of a format that is known."""

from __future__ import annotations

import json
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
