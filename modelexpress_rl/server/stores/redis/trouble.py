"""What a Redis can have, in words, and whether it is worth asking again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from redis.exceptions import AuthenticationError, RedisError, ResponseError


class Cure(Enum):
    """What helps."""

    LOAD = auto()
    """Nothing has happened: send the script itself."""
    ROUTE = auto()
    """Nothing has happened: another node has it."""
    ASK = auto()
    """Nothing has happened: another node has it this once."""
    AGAIN = auto()
    """Nothing has happened: it passes by itself."""
    RECONNECT = auto()
    """Nothing has happened: another node, or a new connection, can do it."""
    UNKNOWN = auto()
    """It may have happened: asking again finds out."""
    NONE = auto()
    """Nothing has happened, and nothing will until somebody mends it."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a command has no answer; `place` is where a cluster says that the key is."""

    cure: Cure
    words: str
    place: str = ""
    cause: BaseException | None = None

    @property
    def may_have_happened(self) -> bool:
        """Whether the command may have been carried out."""
        return self.cure is Cure.UNKNOWN


_MOVING = "is moving the keys to another node"
_KNOWN: dict[str, tuple[Cure, str]] = {
    "NOSCRIPT": (Cure.LOAD, "has lost its scripts"),
    "TRYAGAIN": (Cure.AGAIN, _MOVING),
    "CLUSTERDOWN": (Cure.ROUTE, "is a cluster that is down: slots are served by no node"),
    "LOADING": (Cure.AGAIN, "is loading its data set"),
    "MASTERDOWN": (Cure.RECONNECT, "is a replica that has lost its primary"),
    "READONLY": (Cure.RECONNECT, "is a read-only replica: is the primary elsewhere now?"),
    "NOREPLICAS": (Cure.AGAIN, "has fewer replicas than it needs to accept writes (min-replicas-to-write)"),
    "MISCONF": (Cure.AGAIN, "can't write its data to disk, and so accepts no writes"),
    "UNBLOCKED": (Cure.RECONNECT, "has just become a replica"),
    "OOM": (Cure.NONE, "is out of memory (maxmemory): raise it, or release versions; nothing was stored"),
    "WRONGTYPE": (Cure.NONE, "holds something else under this store's keys: give the store another prefix"),
    "NOAUTH": (Cure.NONE, "asks for a password: give it in the address, or as password_file"),
    "WRONGPASS": (Cure.NONE, "refuses the user name or the password"),
    "NOPERM": (Cure.NONE, "doesn't allow this user the commands or keys that the store needs"),
}
_BUSY = "is busy with a script that does not end (BUSY); an operator can end it by SCRIPT KILL"
# Inside the error of a script older servers hide the code of the command that failed.
_CODE = re.compile(r"(?:^|[ -])(" + "|".join((*_KNOWN, "BUSY", "MOVED", "ASK")) + r")(?= |$)")


def of_error(error: BaseException) -> Trouble:
    """What the reply of one command says is wrong."""
    text = str(error)
    code = _code_of(error, text)
    if code in ("MOVED", "ASK"):
        place = text.split()[-1]
        cure = Cure.ASK if code == "ASK" else Cure.ROUTE
        return Trouble(cure, _MOVING, place, error)
    if code == "BUSY":
        return Trouble(Cure.AGAIN, _BUSY, cause=error)
    if code in _KNOWN:
        cure, words = _KNOWN[code]
        return Trouble(cure, words, cause=error)
    if isinstance(error, ResponseError | AuthenticationError):
        return Trouble(Cure.NONE, f"refuses a command: {text}", cause=error)
    return lost(error)


def lost(error: BaseException) -> Trouble:
    """What a connection that broke after the command was sent says.

    Of some replies (LOADING, NOAUTH) redis-py makes a connection that broke.
    """
    known = _KNOWN.get(_code_of(error, str(error)) or "")
    words = known[1] if known else f"broke the connection: {_plain(error)}"
    return Trouble(Cure.UNKNOWN, words, cause=error)


def unreachable(error: BaseException) -> Trouble:
    """What a connection that could not be made says."""
    if isinstance(error, TimeoutError) and not isinstance(error, RedisError):
        return Trouble(Cure.RECONNECT, "can't be reached: no answer in time", cause=error)
    named = of_error(error)
    if named.cure is not Cure.UNKNOWN:
        return named
    return Trouble(Cure.RECONNECT, f"can't be reached: {_plain(error)}", cause=error)


def silent(waited_s: float) -> Trouble:
    """No reply came in time."""
    words = f"did not answer within {waited_s:.3g} s: stopped, paused, cut off, or busy with something long"
    return Trouble(Cure.UNKNOWN, words)


def no_cluster(redirected: Trouble) -> Trouble:
    """A redirection where the address names no cluster."""
    words = "is part of a cluster: its address must begin with redis-cluster://"
    return Trouble(Cure.NONE, words, cause=redirected.cause)


def unconfirmed(got: int, wanted: int) -> Trouble:
    """Too few replicas have it."""
    words = f"has a change that {got} of {wanted} replicas have confirmed: it may yet be lost"
    return Trouble(Cure.UNKNOWN, words)


# redis-py takes the code off the text where it has a class for it.
_CLASS_CODES = {
    "AskError": "ASK",
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "MovedError": "MOVED",
    "NoPermissionError": "NOPERM",
    "NoScriptError": "NOSCRIPT",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "TryAgainError": "TRYAGAIN",
}


def _code_of(error: BaseException, text: str) -> str | None:
    """The code of an error reply."""
    if not isinstance(error, RedisError):
        return None
    if code := _CLASS_CODES.get(type(error).__name__):
        return code
    if found := _CODE.search(f"{getattr(error, 'status_code', '')} {text}"):
        return found.group(1)
    return None


def _plain(error: BaseException) -> str:
    return str(error) or type(error).__name__
