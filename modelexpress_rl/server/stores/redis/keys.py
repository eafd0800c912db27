"""What lies where: keys, their hash tags, and the order of the listings.

A cluster runs a script only over keys of one slot. So the store is cut into buckets, each with a hash
tag of its own: a version, with the part of every index that names it, is in the bucket of its uid, and
one script changes them together; there is no moment at which they disagree. A worker and an idempotency
key are in the bucket of their own name. A cluster has many buckets, spread evenly over its slots; one
Redis has one. What concerns a whole model asks every bucket.

Identities are any text. In a key they are percent-encoded, so that none can end a hash tag or be taken
for another key; in an index they are bytes that sort as the text does.
"""

from __future__ import annotations

import binascii
import zlib
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

SLOTS = 16_384
CLUSTER_BUCKETS = 32
CHANNEL = "changes"
# A script reads so many records at most: for longer than a few milliseconds nobody else is answered.
MOST_AT_ONCE = 4096


def slot_of(tag: str) -> int:
    """The slot of a cluster that keys with this hash tag are in (CRC16/XMODEM, as Redis defines it)."""
    return binascii.crc_hqx(tag.encode(), 0) % SLOTS


@dataclass(frozen=True, slots=True)
class Bucket:
    """One part of the store: its hash tag and its keys."""

    tag: str

    def _key(self, kind: str) -> str:
        return f"{{{self.tag}}}:{kind}"

    def version(self, uid: str) -> str:
        """A version: a hash of its record, its revision, and what its indexes know of it."""
        return self._key("version:" + _encoded(uid))

    def worker(self, worker_id: str) -> str:
        """A registration, as a version."""
        return self._key("worker:" + _encoded(worker_id))

    def idempotency(self, idempotency_key: str) -> str:
        """Who holds an idempotency key."""
        return self._key("key:" + _encoded(idempotency_key))

    @property
    def versions(self) -> str:
        """The versions, sorted by (model, sequence, uid)."""
        return self._key("versions")

    @property
    def active(self) -> str:
        """Those that are not RETIRED, sorted likewise."""
        return self._key("active")

    @property
    def versions_due(self) -> str:
        """The versions by their wake."""
        return self._key("versions-due")

    @property
    def revision(self) -> str:
        """The newest revision of any version."""
        return self._key("revision")

    @property
    def workers(self) -> str:
        """The workers, sorted by (model, worker)."""
        return self._key("workers")

    @property
    def workers_due(self) -> str:
        """The workers by their wake."""
        return self._key("workers-due")

    @property
    def worker_revision(self) -> str:
        """The newest revision of any worker."""
        return self._key("worker-revision")

    @property
    def claims(self) -> str:
        """The idempotency keys by when they were last claimed."""
        return self._key("claims")

    @property
    def meta(self) -> str:
        """The store's id, clock and sequence; in the first bucket only."""
        return self._key("meta")

    @property
    def sweeper(self) -> str:
        """The server that looks after what is due; in the first bucket only."""
        return self._key("sweeper")

    @property
    def shared(self) -> tuple[str, ...]:
        """The keys that exist once in a bucket, however much it holds."""
        return (
            *(self.versions, self.active, self.versions_due, self.revision),
            *(self.workers, self.workers_due, self.worker_revision, self.claims),
        )


class Buckets:
    """All buckets of a store."""

    def __init__(self, prefix: str, *, cluster: bool) -> None:
        tags = _spread_tags(prefix) if cluster else (prefix,)
        self.all = tuple(Bucket(tag) for tag in tags)
        self.channel = f"{prefix}:{CHANNEL}"

    def number_of(self, name: str) -> int:
        """The number of the bucket that this version, worker or idempotency key is in."""
        return zlib.crc32(name.encode()) % len(self.all)


@lru_cache(maxsize=64)
def _spread_tags(prefix: str) -> tuple[str, ...]:
    """Tags whose slots divide a cluster's slots evenly, so that its nodes share the work."""
    width = SLOTS // CLUSTER_BUCKETS
    tags: list[str] = []
    for number in range(CLUSTER_BUCKETS):
        tries = (f"{prefix}.{number}.{attempt}" for attempt in range(1_000_000))
        tags.append(next(tag for tag in tries if slot_of(tag) // width == number))
    return tuple(tags)


@lru_cache(maxsize=32_768)
def _encoded(name: str) -> str:
    return quote(name, safe="")


# Members of the sorted listings. Text ends with a zero byte, and a zero byte in it is followed by 255:
# so bytes sort as the tuples do, and nothing in a name can be taken for its end.

_END, _ESCAPED, LAST = b"\0", b"\0\xff", b"\xff"


def _text(name: str) -> bytes:
    return name.encode().replace(_END, _ESCAPED) + _END


def model_range(model_name: str | None) -> tuple[bytes, bytes]:
    """The bounds of a listing of one model, or of all."""
    if model_name is None:
        return b"-", b"+"
    return b"[" + _text(model_name), b"(" + _text(model_name) + LAST


def version_member(model_name: str, sequence: int, uid: str) -> bytes:
    """How a version stands in its listings."""
    return _text(model_name) + f"{sequence:016x}".encode() + uid.encode()


def after_sequence(model_name: str, sequence: int) -> bytes:
    """The bound before which are this model's versions up to `sequence`, and the models before it."""
    return b"(" + version_member(model_name, sequence, "") + LAST


def later(one: bytes, other: bytes) -> bytes:
    """The later of two lower bounds of a listing."""
    return max(one, other, key=lambda bound: b"" if bound == b"-" else bound[1:])


def version_of(member: bytes) -> tuple[str, int, str]:
    """Model, sequence and uid of a version's member."""
    model_name, rest = _split(member)
    return model_name, int(rest[:16], 16), rest[16:].decode()


def worker_member(model_name: str, worker_id: str) -> bytes:
    """How a worker stands in its listing."""
    return _text(model_name) + worker_id.encode()


def worker_of(member: bytes) -> str:
    """The id of a worker's member."""
    return _split(member)[1].decode()


def _split(member: bytes) -> tuple[str, bytes]:
    at = member.index(_END)
    while member[at + 1 : at + 2] == LAST:
        at = member.index(_END, at + 1)
    return member[:at].replace(_ESCAPED, _END).decode(), member[at + 1 :]
