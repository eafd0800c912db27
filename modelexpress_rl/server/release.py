"""Which release this is."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def server_version() -> str:
    """The installed release; it is read from the disk once."""
    try:
        return version("modelexpress-rl")
    except PackageNotFoundError:
        return "unknown"
