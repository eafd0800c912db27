"""What `mx-rl doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was found, and what to do about it."""

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def ok(subject: str, found: str) -> Finding:
    return Finding(subject, Verdict.OK, found)


def warn(subject: str, found: str, advice: str) -> Finding:
    return Finding(subject, Verdict.WARN, found, advice)


def fail(subject: str, found: str, advice: str) -> Finding:
    return Finding(subject, Verdict.FAIL, found, advice)


def skip(subject: str, found: str) -> Finding:
    return Finding(subject, Verdict.SKIP, found)
