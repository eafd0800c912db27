"""The versions that a host holds: made once, in files that survive crashes, and shared by its ranks.

The driver of `statemachines.local_store`. Under one folder for each model lie

    versions/<uid>/      a sealed version: its files, and manifest.json with their digests
    building/<uid>/      an unfinished one: source.json, its files, and a note for each that is durable
    locks/<uid>.lock     held exclusively by who makes or evicts it, shared by who reads it
    active.json          the version that engines of this host serve
    trash/               what is being removed

A process that dies leaves nothing that another must wait for or heal: locks end with it, what is sealed
was renamed into place when it was complete, and an unfinished version is gone on with.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

from modelexpress_rl.canonical.disk import (
    as_one_part,
    digest_of,
    locked,
    read_json,
    removed,
    sync_folder,
    write_json,
)
from modelexpress_rl.canonical.index import is_plain_name
from modelexpress_rl.errors import DeadlineExceeded, DigestMismatch, StateError, Unavailable, UsageError
from statemachines import local_store as machine
from statemachines.ids import VersionId
from statemachines.kernel import Refused
from statemachines.local_store_records import (
    Activate,
    Begin,
    Building,
    Damaged,
    DiscardBuilding,
    DropFile,
    Event,
    Evict,
    FileDamaged,
    FileDurable,
    Found,
    MakeFolder,
    PointActive,
    Promote,
    Seal,
    Sealed,
    StoredRecord,
    StoredState,
    Withdraw,
)

LOCK_TIMEOUT_S = 600.0
_MANIFEST, _SOURCE, _NOTE = "manifest.json", "source.json", ".durable.json"


class LocalStore:
    """The versions of one model on this host. Any number of processes may use one folder at once.

    `quota_bytes` bounds what lies there. `step` is called with a name before each change of the disk; tests
    kill the process there.
    """

    def __init__(
        self,
        root: Path,
        model_name: str,
        *,
        quota_bytes: int | None = None,
        step: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._root = root / as_one_part(model_name, "model_name")
        self._quota_bytes = quota_bytes
        self._step = step
        self._checked: set[tuple[str, int]] = set()
        for folder in ("versions", "building", "locks", "trash"):
            (self._root / folder).mkdir(parents=True, exist_ok=True)
        for path in (self._root / "trash").iterdir():  # what processes that died were removing
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def building(
        self,
        version: str,
        source: str,
        sizes: Mapping[str, int],
        *,
        keep: frozenset[str] = frozenset(),
        timeout_s: float = LOCK_TIMEOUT_S,
    ) -> Iterator[Build]:
        """Make a version, or go on with it; one process at a time, the others wait, and find it made.

        `source` says what it is made from (an index's digest), `sizes` the bytes of its files. Versions in
        `keep` are not evicted for it (those that it is made from).

        Raises:
            UsageError: a file's name is none, or the version is there from another source.
            DeadlineExceeded: another process made it, or read it, for all of `timeout_s`.
            Unavailable: there is no room within the quota, even without all that may go.
        """
        if odd := [name for name in sizes if not is_plain_name(name)]:
            raise UsageError(f"version {version}: {odd[0]!r} is no plain name of a file")
        with self._lock(version, shared=False, timeout_s=timeout_s):
            build = Build(self, self._found(version))
            build.tell(Begin(source, frozenset(sizes)))
            build.drop_damaged()
            self._make_room(sum(sizes[name] for name in build.missing), keep | {version})
            yield build

    @contextlib.contextmanager
    def reading(self, version: str, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[Path]:
        """The folder of a sealed version, which stays while it is read; checked by who reads it first.

        Raises:
            StateError: it is not there.
            DigestMismatch: a file is not what was sealed; the version was withdrawn.
            DeadlineExceeded: another process makes it.
        """
        with self._lock(version, shared=True, timeout_s=timeout_s):
            path = self._folder(version)
            damaged = self._damaged(version)
            if damaged is None:
                yield path
                return
        with self._lock(version, shared=False, timeout_s=timeout_s):
            if self._damaged(version) is not None:
                Build(self, self._found(version)).tell(Damaged())
        raise DigestMismatch(f"version {version}: {damaged}; it was withdrawn, and can be made again")

    def activate(self, version: str, *, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        """Note that engines of this host serve a version, which is not evicted then.

        Raises:
            StateError: it is not there.
        """
        with self._lock(version, shared=True, timeout_s=timeout_s):
            Build(self, self._found(version, clean=False)).tell(Activate())

    def active(self) -> str | None:
        """The version that engines of this host serve."""
        value = (read_json(self._root / "active.json") or {}).get("version")
        return value if isinstance(value, str) else None

    def versions(self) -> list[str]:
        """The versions that are sealed, those that were used last at the end."""
        parts = [each.name for each in (self._root / "versions").iterdir()]
        return [unquote(part) for part in sorted(parts, key=self._used)]

    def evict(self, version: str) -> None:
        """Remove a version, or what there is of it.

        Raises:
            StateError: it is active, or somebody makes or reads it.
        """
        try:
            with self._lock(version, shared=False, timeout_s=0):
                active = self.active() == version  # asked under the lock, which activating takes, too
                Build(self, self._found(version)).tell(Evict(active=active, read=False))
        except DeadlineExceeded as error:
            raise StateError(f"version {version} is being read or made") from error

    # What the machine asks for.

    def perform(self, version: str, effect: Any) -> None:
        """Change the disk as the machine says; a crash in it leaves what `Found` understands."""
        self._step(type(effect).__name__)
        made = self._unfinished(version)
        match effect:
            case MakeFolder(source, files):
                made.mkdir(parents=True)
                write_json(made / _SOURCE, {"source": source, "files": sorted(files)})
            case DropFile(name):
                (made / (name + _NOTE)).unlink(missing_ok=True)
                (made / name).unlink(missing_ok=True)
            case DiscardBuilding():
                removed(made, self._root / "trash")
            case Promote():
                self._promote(version)
            case PointActive():
                write_json(self._root / "active.json", {"version": version})
            case Withdraw():
                removed(self._folder(version), self._root / "trash")

    def _promote(self, version: str) -> None:
        made = self._unfinished(version)
        building = _announced(read_json(made / _SOURCE))
        assert building is not None
        for stray in made.glob(".*"):  # of a document that was being written when its process died
            stray.unlink()
        notes = {name: read_json(made / (name + _NOTE)) for name in sorted(building.files)}
        write_json(made / _MANIFEST, {"source": building.source, "files": notes})
        self._step("rename")
        if self._folder(version).exists():  # a version whose manifest is lost: it was nobody's to use
            removed(self._folder(version), self._root / "trash")
        os.rename(made, self._folder(version))
        sync_folder(self._root / "versions")
        self._step("renamed")

    def keep(self, version: str, name: str, write: Callable[[IO[bytes]], None]) -> None:
        """Make one file of an unfinished version durable, then note its digest."""
        made = self._unfinished(version)
        self._step(f"write {name}")
        with open(made / name, "wb") as file:
            write(file)
            file.flush()
            self._step(f"sync {name}")
            os.fsync(file.fileno())
        note = {"size": (made / name).stat().st_size, "xxh3_128": digest_of(made / name)}
        self._step(f"note {name}")
        write_json(made / (name + _NOTE), note)
        self._step(f"noted {name}")

    # What lies on the disk.

    def _found(self, version: str, *, clean: bool = True) -> StoredRecord:
        """The record of a version by what lies there; leftovers are removed."""
        record = StoredRecord(VersionId(version))
        made = self._unfinished(version)
        building = _announced(read_json(made / _SOURCE))
        if building is not None:
            noted = frozenset(name for name in building.files if read_json(made / (name + _NOTE)))
            building = replace(building, durable=noted)
        manifest = self._manifest(version)
        sealed = Sealed(str(manifest["source"])) if manifest is not None else None
        decision = machine.decide(record, Found(sealed, building, junk=building is None and made.exists()))
        for effect in decision.effects if clean else ():
            self.perform(version, effect)
        return decision.record

    def _damaged(self, version: str) -> str | None:
        """What is wrong with a sealed version; checked once by each process.

        Raises:
            StateError: it is not there.
        """
        path = self._folder(version)
        manifest = self._manifest(version)
        if manifest is None:
            if path.exists():
                return f"{_MANIFEST} can't be read"
            raise StateError(f"version {version} is not in {self._root}")
        key = (version, path.stat().st_ctime_ns)
        if key in self._checked:
            return None
        for name, note in manifest["files"].items():
            if (found := wrong(path / name, note)) is not None:
                return found
        self._checked.add(key)
        return None

    def _manifest(self, version: str) -> dict[str, Any] | None:
        """What was sealed; None where there is nothing, or nothing that can be understood."""
        value = read_json(self._folder(version) / _MANIFEST)
        files = (value or {}).get("files")
        known = isinstance(files, dict) and all(map(is_plain_name, files))
        return value if known and isinstance((value or {}).get("source"), str) else None

    def _make_room(self, size_bytes: int, keep: frozenset[str]) -> None:
        if self._quota_bytes is None or not size_bytes:
            return
        for folder in ("building", "versions"):
            for part in sorted((each.name for each in (self._root / folder).iterdir()), key=self._used):
                if self._size() + size_bytes <= self._quota_bytes:
                    return
                if unquote(part) not in keep:
                    with contextlib.suppress(StateError):
                        self.evict(unquote(part))
        if (held := self._size()) + size_bytes > self._quota_bytes:
            raise Unavailable(
                f"{self._root}: {size_bytes} bytes are wanted, {held} of {self._quota_bytes} are taken "
                "by versions that are active, read or replayed"
            )

    def _size(self) -> int:
        """The bytes of all versions, unfinished ones too; another process may be removing some."""
        total = 0
        for folder in ("building", "versions"):
            for path in (self._root / folder).rglob("*"):
                with contextlib.suppress(FileNotFoundError):
                    total += path.stat().st_size if path.is_file() else 0
        return total

    def _used(self, part: str) -> float:
        with contextlib.suppress(FileNotFoundError):
            return (self._root / "locks" / f"{part}.lock").stat().st_mtime
        return 0.0

    def _folder(self, version: str) -> Path:
        return self._root / "versions" / as_one_part(version, "version")

    def _unfinished(self, version: str) -> Path:
        return self._root / "building" / as_one_part(version, "version")

    @contextlib.contextmanager
    def _lock(self, version: str, *, shared: bool, timeout_s: float) -> Iterator[None]:
        part = as_one_part(version, "version")
        with locked(self._root / "locks" / f"{part}.lock", shared=shared, timeout_s=timeout_s):
            yield


def _announced(document: dict[str, Any] | None) -> Building | None:
    """What an unfinished folder says that it will hold; None where it says nothing that is understood."""
    source, files = (document or {}).get("source"), (document or {}).get("files")
    if isinstance(source, str) and isinstance(files, list) and all(map(is_plain_name, files)):
        return Building(source, frozenset(files))
    return None


def wrong(path: Path, note: Any) -> str | None:
    """What is wrong with a file by the note of its size and digest."""
    try:
        if path.stat().st_size != note["size"]:
            return f"{path.name}: expected {note['size']} bytes, got {path.stat().st_size}"
        if (got := digest_of(path)) != note["xxh3_128"]:
            return f"{path.name}: expected xxh3-128 {note['xxh3_128']}, got {got}"
    except (OSError, KeyError, TypeError) as error:
        return f"{path.name}: {error!r}"
    return None


@dataclass(slots=True)
class Build:
    """A version while one process has it for itself."""

    store: LocalStore
    record: StoredRecord

    @property
    def sealed(self) -> bool:
        """Whether it is made; there is nothing to do then."""
        return self.record.state is StoredState.SEALED

    @property
    def missing(self) -> list[str]:
        """The files that are yet to be made, by name."""
        phase = self.record.phase
        return sorted(phase.files - phase.durable) if isinstance(phase, Building) else []

    def add(self, name: str, write: Callable[[IO[bytes]], None]) -> None:
        """Make a file: `write` gets it open. When this returns, it survives a crash.

        Raises:
            UsageError: it is none of the version's.
            OSError: the disk is full, or fails; the version can be gone on with.
        """
        self._check(FileDurable(name))
        self.store.keep(self.record.version_id, name, write)
        self.tell(FileDurable(name))

    def seal(self) -> None:
        """The version is complete, and visible from now on; a repeat is harmless.

        Raises:
            StateError: a file is missing.
        """
        self.tell(Seal())

    def drop_damaged(self) -> None:
        """Look at every file that another run left, and take away what is not as it was noted."""
        phase = self.record.phase
        if isinstance(phase, Building):
            made = self.store._unfinished(self.record.version_id)
            for name in sorted(phase.durable):
                if wrong(made / name, read_json(made / (name + _NOTE))) is not None:
                    self.tell(FileDamaged(name))

    def tell(self, event: Event) -> None:
        """Tell the machine, and do what it asks for."""
        decision = self._check(event)
        for effect in decision.effects:
            self.store.perform(self.record.version_id, effect)
        self.record = decision.record

    def _check(self, event: Event) -> Any:
        try:
            return machine.decide(self.record, event)
        except Refused as refusal:
            kind = UsageError if isinstance(event, Begin | FileDurable) else StateError
            raise kind(refusal.message) from refusal
