"""Canonical weights in object storage: the seam; the method itself is not implemented yet."""

from __future__ import annotations

from typing import NoReturn

from modelexpress_rl.errors import UsageError
from modelexpress_rl.object_storage import ObjectStorageConfig


def build_canonical_method(storage: ObjectStorageConfig) -> NoReturn:
    """Make the method that uploads deltas and checkpoints under `storage.uri_prefix`.

    Raises:
        UsageError: always, in this version.
    """
    raise UsageError(
        f"object_storage ({storage.uri_prefix}): publishing to object storage is not implemented in this "
        "version; leave object_storage out to publish FULL_TENSOR"
    )
