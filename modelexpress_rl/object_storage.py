"""Where canonical weights lie, as users configure it: data and its validation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from modelexpress_rl.errors import UsageError


class ObjectStorageType(StrEnum):
    """The kinds of object storage that the wire can name; only S3 is implemented."""

    S3 = "S3"
    AZURE = "AZURE"
    GCS = "GCS"


@dataclass(frozen=True)
class ObjectStorageSource:
    """The URI of a version's safetensors index; whether it is acceptable, the control plane decides.

    Raises:
        UsageError: the URI is blank, or the type is none.
    """

    storage_type: ObjectStorageType
    uri: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage_type", _kind("storage_type", self.storage_type))
        if not isinstance(self.uri, str) or not self.uri.strip():
            raise UsageError(f"uri must be a non-blank string, not {self.uri!r}")


@dataclass(frozen=True)
class ObjectStorageConfig:
    """Where a trainer writes its versions: objects under `uri_prefix`.

    `initial_base_version_id` names the version that the files in `seed_checkpoint_path` hold: what the first
    delta is made against.

    Raises:
        UsageError: a value is not acceptable; the message names it.
    """

    storage_type: ObjectStorageType
    uri_prefix: str
    initial_base_version_id: str | None = None
    seed_checkpoint_path: str | Path | None = None
    endpoint_url: str | None = None
    region_name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage_type", _s3("storage_type", self.storage_type))
        for name in ("initial_base_version_id", "seed_checkpoint_path"):
            value = getattr(self, name)
            if value is not None and not str(value).strip():
                raise UsageError(f"{name} must not be blank")
        # A prefix may be a bare bucket; an index in it makes the URI that is checked.
        check_uri("uri_prefix", f"{self.uri_prefix}".removesuffix("/") + "/model.safetensors.index.json")


@dataclass(frozen=True)
class ObjectStorageGeneratorConfig:
    """How a generator reads versions from object storage, and where it keeps them on its host.

    `initial_base_version_id` names the version that the files in `seed_checkpoint_path` hold;
    `refit_checkpoint_dir` is shared by the ranks of one host.

    Raises:
        UsageError: a value is not acceptable; the message names it.
    """

    storage_type: ObjectStorageType
    initial_base_version_id: str
    seed_checkpoint_path: str | Path
    refit_checkpoint_dir: str | Path
    refit_checkpoint_max_size_gb: float = 500
    endpoint_url: str | None = None
    region_name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage_type", _s3("storage_type", self.storage_type))
        for name in ("initial_base_version_id", "seed_checkpoint_path", "refit_checkpoint_dir"):
            if not str(getattr(self, name) or "").strip():
                raise UsageError(f"{name} must not be blank")
        if not self.refit_checkpoint_max_size_gb > 0:
            raise UsageError(
                f"refit_checkpoint_max_size_gb must be positive, not {self.refit_checkpoint_max_size_gb!r}"
            )


def check_uri(name: str, uri: str) -> None:
    """Accepts `s3://bucket/key`, without query, fragment or empty path parts.

    Raises:
        UsageError: it is something else; the message begins with `name`.
    """
    scheme, separator, path = uri.partition("://") if isinstance(uri, str) else ("", "", "")
    parts = path.split("/")
    if scheme != "s3" or not separator or len(parts) < 2 or not all(parts) or "?" in uri or "#" in uri:
        raise UsageError(f"{name} must be s3://bucket/key without ?, # or empty parts, not {uri!r}")


def _kind(name: str, value: str) -> ObjectStorageType:
    try:
        return ObjectStorageType(value)
    except ValueError:
        raise UsageError(f"{name} must be one of {', '.join(ObjectStorageType)}, not {value!r}") from None


def _s3(name: str, value: str) -> ObjectStorageType:
    kind = _kind(name, value)
    if kind is not ObjectStorageType.S3:
        raise UsageError(f"{name} {kind} is not implemented; only S3 is")
    return kind
