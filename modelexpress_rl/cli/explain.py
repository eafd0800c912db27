"""`mx-rl explain`: plans that generators wrote, as tables, as a picture, or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from modelexpress_rl.cli import common
from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard.explain import PlanSummary
from modelexpress_rl.reshard.explain_svg import heat_map


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "plans", nargs="+", metavar="PATH", help="files of MX_EXPLAIN_DIR, or directories of them"
    )
    parser.add_argument("--svg", metavar="PATH", help="write a heat map there: ranks by sources, by bytes")
    common.add_json(parser, "the summaries as one JSON list")


def run(options: argparse.Namespace) -> int:
    """Print what the files say; draw it where `--svg` asks for it.

    Raises:
        UsageError: a file is missing or is no plan, or the picture can't be written.
    """
    plans = sorted(map(_read, _files(options.plans)), key=lambda plan: plan.owner)
    if options.svg:
        try:
            Path(options.svg).write_text(heat_map(plans), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{options.svg}: the picture can't be written there: {error}") from error
    if options.json:
        print(common.dump([json.loads(plan.to_json()) for plan in plans]))
    else:
        print("\n\n".join(plan.text() for plan in plans))
    return 0


def _files(paths: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"{path}: no plan (*.json) is there")
        found += inside
    return found


def _read(path: Path) -> PlanSummary:
    try:
        return PlanSummary.from_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error}") from error
    except UsageError as error:
        raise UsageError(f"{path} is no plan: {error}") from error
