"""Logs that people and machines read: text or one JSON object a line, with ids as fields of their own.

with logs.about(version_id="v7", worker_id="trainer-0"):
    _LOG.warning("the store is away")  # {"level": "WARNING", ..., "version_id": "v7", ...}

Fields come from `about` (for all that is logged inside) and from `extra=` of one record. Only the names
in `FIELDS` are written, so that nothing else of a record, and no secret, ends up in a log by accident.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from datetime import UTC, datetime
from typing import TextIO

from modelexpress_rl import tracing
from modelexpress_rl.printable import printable

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
FIELDS = ("version_id", "worker_id", "model_name", "rpc", "code", "duration_ms", "state", "trace_id")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# They write headers at DEBUG, and with them the bearer token.
_TALKATIVE = ("hpack", "h2", "grpclib")

Fields = Callable[[], dict[str, str]]
_about: ContextVar[Fields] = ContextVar("modelexpress_rl_log_fields", default=dict)


@contextmanager
def about(**fields: str) -> Iterator[None]:
    """Give everything that is logged inside these fields; blank ones are left out."""
    present = {**_about.get()(), **{name: value for name, value in fields.items() if value}}
    token = _about.set(lambda: present)
    try:
        yield
    finally:
        _about.reset(token)


def about_lazily(fields: Fields) -> Token[Fields]:
    """As `about`, for code that every call passes: `fields` is called only when something is logged."""
    return _about.set(fields)


def no_longer_about(token: Token[Fields]) -> None:
    """End what `about_lazily` began."""
    _about.reset(token)


def only(**fields: str) -> None:
    """Give everything that this task logs from now on these fields and no others."""
    _about.set(lambda: fields)


def configure(form: str, level: str, stream: TextIO | None = None) -> None:
    """Log to `stream` (stderr) from `level` on, as "text" or "json"; replaces earlier handlers."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)


class TextFormatter(logging.Formatter):
    """A line for people, with the fields behind it: `... [version_id=v7 worker_id=trainer-0]`.

    An id with a line break or an escape makes no line of its own, and none that a terminal obeys.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The message in one line; what was raised follows in its own."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        fields = " ".join(f"{name}={printable(str(value))}" for name, value in _fields(record).items())
        if not fields:
            return text
        first, newline, rest = text.partition("\n")
        return f"{first} [{fields}]{newline}{rest}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the fields, and what was raised."""

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    own = {name: value for name, value in vars(record).items() if name in FIELDS}
    present: dict[str, object] = {**_about.get()(), **own}
    if trace_id := tracing.trace_id():
        present["trace_id"] = trace_id
    return {name: present[name] for name in FIELDS if name in present}
