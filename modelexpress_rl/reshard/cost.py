"""What reads cost: a handful of constants of a machine, measured by `mx-rl bench transport` and stored.

A plan chooses by them, piece by piece, between exact runs and whole rows. They need to be right within a
factor of two or so; where nothing was measured, those of one ordinary host serve.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from modelexpress_rl import envs
from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard.document import read_document, write_document

_log = logging.getLogger(__name__)

FORMAT = 1
MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TransportCost:
    """What reading costs here.

    `wire_bytes_per_s` for big runs; `run_s` for each further run (descriptor) of a read; `read_s` for
    each read, posting and completion together; `copy_bytes_per_s` for a strided copy on this host.

    Raises:
        UsageError: a constant is no positive number; the message names it.
    """

    wire_bytes_per_s: float
    run_s: float
    read_s: float
    copy_bytes_per_s: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UsageError(f"{each.name}: expected a positive number, got {value!r}")

    def seconds(self, *, wire_bytes: Any, runs: Any = 0, reads: Any = 0, copied_bytes: Any = 0) -> Any:
        """What reads of these sums cost; numbers, or columns of them."""
        return (
            wire_bytes / self.wire_bytes_per_s
            + runs * self.run_s
            + reads * self.read_s
            + copied_bytes / self.copy_bytes_per_s
        )


DEFAULT_COST = TransportCost(
    wire_bytes_per_s=5e9,
    run_s=1.2e-6,
    read_s=100e-6,
    copy_bytes_per_s=5e9,
)
"""Measured between two processes of one host (cma). The run that costs as much as its bytes, 6 KB, is
much the same over RDMA, where both are faster."""


def load_cost(path: Path | None = None) -> TransportCost:
    """The constants that were stored for this machine; `DEFAULT_COST` where none were.

    A file that can't be read is told in the log, and not used: it is only a cache.

    Raises:
        UsageError: MX_TRANSPORT_COST_FILE names a file that is not there.
    """
    named = path is None and envs.transport_cost_file_is_named()
    path = Path(envs.transport_cost_file()) if path is None else path
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        if named:
            raise UsageError(
                f"MX_TRANSPORT_COST_FILE: {path} does not exist; `mx-rl bench transport` makes it"
            ) from None
        return DEFAULT_COST
    except OSError as error:
        _log.warning("%s can't be read (%s): reads are planned by the built-in costs", path, error)
        return DEFAULT_COST
    try:
        return decode_cost(data)
    except UsageError as error:
        _log.warning("%s is not used: %s; reads are planned by the built-in costs", path, error)
        return DEFAULT_COST


def decode_cost(data: bytes) -> TransportCost:
    """Read what `store_cost` wrote.

    Raises:
        UsageError: it is something else.
    """
    document = read_document(data, format_number=FORMAT, max_bytes=MAX_FILE_BYTES)
    names = [each.name for each in fields(TransportCost)]
    if missing := [name for name in names if name not in document]:
        raise UsageError(f"it lacks {', '.join(missing)}")
    return TransportCost(**{name: document[name] for name in names})


def store_cost(cost: TransportCost, path: Path, *, measured_on: str) -> None:
    """Write the file that `load_cost` reads, in one step.

    Raises:
        UsageError: it can't be written there.
    """
    document = {"format": FORMAT, **asdict(cost), "measured_on": measured_on}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_document(path, json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"{path}: the costs can't be stored there: {error}") from error
