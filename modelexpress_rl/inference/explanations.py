"""Leaving what a generator's plans read where `mx-rl explain` finds it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from modelexpress_rl import envs
from modelexpress_rl.reshard.document import write_document
from modelexpress_rl.reshard.explain import PlanSummary

_log = logging.getLogger(__name__)


def write(plan: PlanSummary, owner: str) -> None:
    """Write the summary to MX_EXPLAIN_DIR, over that of the owner's former plan; nothing where it is unset.

    A directory that can't be written to is told in the log: nobody's refit waits for a picture.
    """
    directory = envs.explain_dir()
    if directory is None:
        return
    path = Path(directory) / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', owner)[:200]}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_document(path, plan.to_json())
    except OSError as error:
        _log.warning("MX_EXPLAIN_DIR: the plan of %s can't be written: %s", owner, error)
