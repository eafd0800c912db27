"""Checks of a JSON document's columns: types, ranges and lengths, at the speed of C.

Each looks at a whole column at once, and for the culprit only when that fails. They raise ManifestError,
whose message begins with `where(i)` for the value at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import numpy as np

from modelexpress_rl.errors import ManifestError
from modelexpress_rl.reshard.geometry import MAX_EXTENT, MAX_RANK, Int, padded

MAX_TEXT_CHARS = 1024

Where = Callable[[int], str]


def fields(rows: Sequence[Any], keys: tuple[str, ...], where: Where) -> list[list[Any]]:
    """The values of each key, column by column."""
    if set(map(type, rows)) - {dict}:
        at = next(i for i, row in enumerate(rows) if type(row) is not dict)
        raise ManifestError(f"{where(at)}: expected an object, got {short(rows[at])}")
    try:
        columns = list(zip(*map(itemgetter(*keys), rows), strict=True))
    except KeyError:
        at, key = next((i, key) for i, row in enumerate(rows) for key in keys if key not in row)
        raise ManifestError(f"{where(at)}: field {key!r} is missing") from None
    return [list(column) for column in columns] or [[] for _ in keys]


def texts(values: list[Any], where: Where, field: str, *, allow_empty: bool = False) -> None:
    """Every value is a printable string of up to `MAX_TEXT_CHARS` characters."""
    shortest = 0 if allow_empty else 1

    def fits(value: object) -> bool:
        return type(value) is str and shortest <= len(value) <= MAX_TEXT_CHARS and value.isprintable()

    def all_fit() -> bool:
        if set(map(type, values)) - {str}:
            return False
        distinct = set(values)  # most columns repeat few strings
        lengths = set(map(len, distinct))
        # A lone surrogate is not printable, so what passes can be encoded.
        return not lengths - set(range(shortest, MAX_TEXT_CHARS + 1)) and "".join(distinct).isprintable()

    if not all_fit():
        at = next(i for i, value in enumerate(values) if not fits(value))
        raise ManifestError(
            f"{where(at)}: {field} must be a printable string of {shortest} to {MAX_TEXT_CHARS} characters, "
            f"got {short(values[at])}"
        )


def lists(values: list[Any], where: Where, field: str, *, max_length: int | None = None) -> None:
    """Every value is a list."""
    if set(map(type, values)) - {list}:
        at = next(i for i, value in enumerate(values) if type(value) is not list)
        raise ManifestError(f"{where(at)}: {field} must be a list, got {short(values[at])}")
    if max_length is not None and max(map(len, values), default=0) > max_length:
        at = next(i for i, value in enumerate(values) if len(value) > max_length)
        raise ManifestError(
            f"{where(at)}: {field} has rank {len(values[at])}, at most {max_length} is accepted"
        )


def check_integers(values: Sequence[Any], where: Where, field: str, low: int, high: int) -> None:
    """Every value is an integer in `low` .. `high`."""
    if set(map(type, values)) - {int} or (values and not (min(values) >= low and max(values) <= high)):
        at = next(i for i, value in enumerate(values) if type(value) is not int or not low <= value <= high)
        raise ManifestError(
            f"{where(at)}: {field} must be an integer in [{low}, {high}], got {short(values[at])}"
        )


def integers(values: Sequence[Any], where: Where, field: str, low: int, high: int) -> Int:
    """The same, as a column."""
    check_integers(values, where, field, low, high)
    return np.array(values, np.int64)


def coordinates(values: list[list[Any]], where: Where, field: str, width: int, fill: int) -> Int:
    """Ragged coordinates as padded columns; see `geometry.padded`."""

    def row_of(position: int) -> str:
        rows = chain.from_iterable(repeat(row, len(value)) for row, value in enumerate(values))
        return where(next(row for i, row in enumerate(rows) if i == position))

    check_integers(list(chain.from_iterable(values)), row_of, field, 0, MAX_EXTENT)
    return padded(values, width, fill)


def short(value: object) -> str:
    """A value for an error message, however long or deep it is."""
    if isinstance(value, Mapping):
        return f"an object of {len(value)} fields"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"  # printing it may be refused, or long
    if isinstance(value, list) and (len(value) > 2 * MAX_RANK or set(map(type, value)) - {int}):
        return f"a list of {len(value)}"  # what is in it may be deep or long
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
