"""The store of a host: shared, bounded, checked; and killed before every change of the disk."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from modelexpress_rl.canonical.disk import as_one_part, locked
from modelexpress_rl.canonical.local_store import LocalStore
from modelexpress_rl.errors import DeadlineExceeded, DigestMismatch, StateError, Unavailable, UsageError

FILES = {"a.safetensors": b"a" * 5000, "b.safetensors": b"b" * 7000}
SIZES = {name: len(data) for name, data in FILES.items()}
Step = Callable[[str], None]


def nothing(name: str) -> None:
    pass


def make(
    store: LocalStore, version: str, step: Step = nothing, source: str = "s", **more: frozenset[str]
) -> list[str]:
    """Make a version, in two writes for each file; returns the files that were missing."""
    with store.building(version, source, SIZES, timeout_s=5, **more) as build:
        missing = build.missing
        for name in missing:

            def write(file: IO[bytes], data: bytes = version.encode() + FILES[name]) -> None:
                file.write(data[:100])
                file.flush()
                step("half")
                file.write(data[100:])

            build.add(name, write)
        build.seal()
    return missing


def intact(store: LocalStore, version: str) -> bool:
    with store.reading(version, timeout_s=5) as path:
        return all((path / name).read_bytes() == version.encode() + data for name, data in FILES.items())


def advance(root: Path, step: Step = nothing) -> None:
    """What a rank does to go from one version to the next."""
    store = LocalStore(root, "m", step=step)
    make(store, "new", step)
    store.activate("new")
    if "old" in store.versions():
        store.evict("old")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path, "m")


def killed(work: Callable[[Step], None], when: int) -> bool:
    """Run in a process of its own that is killed at that step; False where it ended before."""
    child = os.fork()
    if not child:
        count = 0

        def step(name: str) -> None:
            nonlocal count
            count += 1
            if count == when:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            work(step)
            os._exit(0)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_killed_at_every_step_the_old_version_or_the_new_one_is_there(tmp_path: Path) -> None:
    """And whoever comes next goes on, with nothing to clean up."""
    steps = 0
    while True:
        root = tmp_path / str(steps)
        before = LocalStore(root, "m")
        make(before, "old")
        before.activate("old")
        steps += 1
        ended = not killed(lambda step, root=root: advance(root, step), steps)  # type: ignore[misc]
        after = LocalStore(root, "m")
        active = after.active()
        assert active in ("old", "new")
        assert all(intact(after, version) for version in {active, *after.versions()})
        advance(root)
        assert after.versions() == ["new"]
        assert intact(LocalStore(root, "m"), "new")
        assert list((root / "m" / "building").iterdir()) == []
        if ended:
            break
    assert steps > 15


def test_killed_again_and_again_it_gets_there(tmp_path: Path) -> None:
    """Each process is killed some steps after the one before: what is durable is never made again."""
    chance = random.Random(0)
    for number in range(10):
        root = tmp_path / str(number)
        kills = 0
        while killed(lambda step, root=root: advance(root, step), chance.randint(1, 8)):  # type: ignore[misc]
            kills += 1
            assert kills < 200
        assert LocalStore(root, "m").active() == "new"
        assert intact(LocalStore(root, "m"), "new")


def test_files_that_are_durable_are_not_made_again(store: LocalStore, tmp_path: Path) -> None:
    def full(file: IO[bytes]) -> None:
        raise OSError("the disk is full")

    with store.building("v", "s", SIZES) as build:
        build.add("a.safetensors", lambda file: None)
        with pytest.raises(OSError, match="the disk is full"):
            build.add("b.safetensors", full)
    assert store.versions() == []
    with store.building("v", "s", SIZES) as build:
        assert build.missing == ["b.safetensors"]
    # What another run left is looked at: it is changed now.
    (tmp_path / "m" / "building" / "v" / "a.safetensors").write_bytes(b"x")
    assert make(LocalStore(tmp_path, "m"), "v") == ["a.safetensors", "b.safetensors"]
    assert intact(store, "v")


def test_another_source_begins_anew_and_never_changes_what_is_sealed(store: LocalStore) -> None:
    with store.building("v", "first", SIZES) as build:
        build.add("a.safetensors", lambda file: None)
    assert make(store, "v", source="second") == sorted(FILES)
    assert make(store, "v", source="second") == []
    with pytest.raises(UsageError, match="version v was made from second, it can't be made from third"):
        make(store, "v", source="third")
    assert intact(store, "v")


@pytest.mark.parametrize("name", ["a.safetensors", "manifest.json"])
@pytest.mark.parametrize("how", ["changed", "shorter", "gone"])
def test_what_was_damaged_is_withdrawn_and_made_again(tmp_path: Path, name: str, how: str) -> None:
    make(LocalStore(tmp_path, "m"), "v")
    path = tmp_path / "m" / "versions" / "v" / name
    data = path.read_bytes()
    path.unlink()
    if how != "gone":
        path.write_bytes(b"]" + data[1:] if how == "changed" else data[:-1])
    store = LocalStore(tmp_path, "m")
    with pytest.raises(DigestMismatch, match=f"version v: {name}"), store.reading("v"):
        pass
    assert make(store, "v") == sorted(FILES)
    assert intact(store, "v")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"source": 1, "files": []}', '{"source": "s", "files": ["../x"]}']
)
def test_a_folder_that_says_nothing_is_no_obstacle(store: LocalStore, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "m" / "building" / "v"
    folder.mkdir()
    (folder / "source.json").write_text(text)
    (folder / "a.safetensors").write_bytes(b"x")
    make(store, "v")
    assert intact(store, "v")


def test_one_makes_it_and_the_others_wait_and_use_it(tmp_path: Path) -> None:
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            try:
                missing = make(LocalStore(tmp_path, "m"), "v")
                os._exit(10 if missing else 0)
            finally:
                os._exit(3)
        children.append(child)
    codes = sorted(os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in children)
    assert codes == [0, 0, 0, 10]
    assert intact(LocalStore(tmp_path, "m"), "v")


def test_a_wait_has_a_bound(store: LocalStore) -> None:
    make(store, "v")
    begun = time.monotonic()
    with (
        store.reading("v"),
        pytest.raises(DeadlineExceeded, match=r"v.lock: another process kept it for 0.1 s"),
        store.building("v", "s", SIZES, timeout_s=0.1),
    ):
        pass
    assert time.monotonic() - begun < 5


def test_eviction_spares_what_is_active_read_or_replayed(tmp_path: Path) -> None:
    size = sum(SIZES.values()) + 2000  # with notes and manifest
    store = LocalStore(tmp_path, "m", quota_bytes=4 * size)
    for number, version in enumerate(("active", "read", "base", "old")):
        make(store, version)
        os.utime(tmp_path / "m" / "locks" / f"{version}.lock", (number, number))
    store.activate("active")
    with store.reading("read"):
        make(store, "new", keep=frozenset({"base"}))
        assert set(store.versions()) == {"active", "read", "base", "new"}
        with pytest.raises(StateError, match="version read is being read or made"):
            store.evict("read")
        with pytest.raises(StateError, match="version active is active"):
            store.evict("active")
        with pytest.raises(Unavailable, match="are taken by versions that are active, read or replayed"):
            make(store, "next", keep=frozenset({"base", "new"}))
    make(store, "next", keep=frozenset({"base", "new"}))
    assert set(store.versions()) == {"active", "base", "new", "next"}


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, "m", quota_bytes=2 * sum(SIZES.values()) + 4000)
    for version in ("one", "two"):
        make(store, version)
        os.utime(tmp_path / "m" / "locks" / f"{version}.lock", (1, 1))
    assert intact(store, "one")
    make(store, "three")
    assert store.versions() == ["one", "three"]


def test_names_are_one_part_of_a_path(tmp_path: Path) -> None:
    for name in (".", "..", "a/b", "../../x", "%2e", "ünï", "a b"):
        assert "/" not in as_one_part(name, "version")
        assert as_one_part(name, "version") not in (".", "..")
    store = LocalStore(tmp_path / "root", "../m")
    make(store, "..")
    assert intact(store, "..")
    assert store.versions() == [".."]
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    for bad in ("", "x" * 300):
        with pytest.raises(UsageError, match="version must be of 1 to 255 bytes"):
            store.evict(bad)


def test_misuse_is_named(store: LocalStore) -> None:
    with (
        pytest.raises(UsageError, match=r"'../x.safetensors' is no plain name"),
        store.building("v", "s", {"../x.safetensors": 1}),
    ):
        pass
    with store.building("v", "s", SIZES) as build:
        with pytest.raises(StateError, match=r"version v lacks a.safetensors, b.safetensors"):
            build.seal()
        with pytest.raises(UsageError, match="version v has no file 'c'"):
            build.add("c", lambda file: None)
    with pytest.raises(StateError, match="version v is not in"), store.reading("v"):
        pass
    with pytest.raises(StateError, match="version v is BUILDING: Activate is not possible"):
        store.activate("v")
    assert store.active() is None


def test_a_lock_is_let_go_of_when_its_process_dies(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def work(step: Step) -> None:
        with locked(path, shared=False, timeout_s=0):
            step("held")

    assert killed(work, 1)
    with locked(path, shared=False, timeout_s=0):
        pass
