"""What arguments may be: checks whose errors name the argument, what is expected, and what came.

They stand where a value enters the package. Further in, a name that can't be sent would break not the
call that brought it but whatever task sends it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from modelexpress_rl.errors import UsageError

E = TypeVar("E", bound=StrEnum)

MAX_NAME_CHARS = 1024
"""The longest name that our control plane takes."""
MAX_SECONDS = 1e9
"""Some thirty years: what is longer is a mistake."""
_SHOWN_CHARS = 80


def text(what: str, value: object) -> str:
    """A string that can be sent.

    Raises:
        UsageError: it is no string, or has a lone surrogate, which UTF-8 has no bytes for.
    """
    if not isinstance(value, str):
        raise UsageError(f"{what} must be a string, not {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} must be Unicode text, not {shown(value)}: {error.reason}") from error
    return value


def name(what: str, value: object) -> str:
    """A name: a string that can be sent, is not blank, and has at most `MAX_NAME_CHARS` characters.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{what} must be a non-blank string, not {shown(value)}")
    if len(value) > MAX_NAME_CHARS:
        raise UsageError(f"{what} has {len(value)} characters, more than {MAX_NAME_CHARS}: {shown(value)}")
    return text(what, value)


def texts(what: str, values: Iterable[object]) -> tuple[str, ...]:
    """Several strings that can be sent.

    Raises:
        UsageError: it is a single string (whose letters would count as names), no iterable, or one of
            them is not such a string.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise UsageError(f"{what} must be several strings, such as a list of them, not {shown(values)}")
    return tuple(text(f"{what}[{index}]", value) for index, value in enumerate(values))


def whole(what: str, value: object, least: int, most: int) -> int:
    """A whole number in a range.

    Raises:
        UsageError: it is something else; True and False are no numbers.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{what}: expected a whole number from {least} to {most}, got {shown(value)}")
    return value


def seconds(what: str, value: object, *, or_zero: bool = False, or_for_ever: bool = False) -> float:
    """A span of time: a positive number.

    Raises:
        UsageError: it is something else, 0 without `or_zero`, over `MAX_SECONDS` (infinity counts where
            `or_for_ever`), or NaN.
    """
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if good:
        assert isinstance(value, (int, float))
        good = (value > 0 or (or_zero and value == 0)) and (
            value <= MAX_SECONDS or (or_for_ever and math.isinf(value))
        )
    if not good:
        raise UsageError(f"{what}: expected a positive number of seconds, got {shown(value)}")
    assert isinstance(value, (int, float))
    return value


def choice(kind: type[E], what: str, value: object) -> E:
    """A member of an enum, or its name.

    Raises:
        UsageError: it is neither.
    """
    try:
        return kind(value)  # type: ignore[arg-type]
    except ValueError:
        raise UsageError(f"{what}: expected one of {', '.join(kind)}, got {shown(value)}") from None


def shown(value: object) -> str:
    """A value for a message; a long one is cut."""
    shown = repr(value)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
