"""Options, metrics and log fields: what the documents name is real, and what is real is documented."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import pytest

from modelexpress_rl import logs
from modelexpress_rl.cli.main import SUBCOMMANDS
from modelexpress_rl.server.census import Census, ModelCensus
from modelexpress_rl.server.metrics import Metrics
from statemachines.ids import ModelName

DOCS = Path(__file__).parents[2] / "docs"
OPERATIONS = (DOCS / "operations.md").read_text()
CONFIGURATION = (DOCS / "configuration.md").read_text()


def options_of(command: str) -> set[str]:
    module = importlib.import_module(next(one.module for one in SUBCOMMANDS if one.name == command))
    parser = argparse.ArgumentParser(add_help=False)
    module.configure(parser)
    return {
        option
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for option in action.option_strings
    }


def test_serve() -> None:
    section = CONFIGURATION.split("## `mx-rl serve`")[1].split("\n## ")[0]
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", section))
    assert named == options_of("serve")


@pytest.mark.parametrize("command", ["versions", "workers", "watch", "top", "doctor"])
def test_commands(command: str) -> None:
    (line,) = [line for line in OPERATIONS.splitlines() if line.startswith(f"| `mx-rl {command}")]
    real = options_of(command)
    assert set(re.findall(r"--[a-z-]+", line.split("|", 2)[1] + line.split("` |")[0])) <= real
    common = {"--server", "--timeout", "--json"}
    assert real - common <= set(re.findall(r"--[a-z-]+", line)) | {"--model"}


def test_every_command_is_documented() -> None:
    for one in SUBCOMMANDS:
        assert any(f"mx-rl {one.name}" in path.read_text() for path in DOCS.rglob("*.md")), one.name


def test_metrics() -> None:
    model = ModelCensus(workers={("TRAINER", True): 1})  # type: ignore[arg-type]
    text = Metrics().exposition(Census({ModelName("m"): model})).decode()
    real = set(re.findall(r"^# TYPE (mx_rl_\w+) ", text, re.MULTILINE))
    real = {name for name in real if not name.endswith("_created")}
    assert set(re.findall(r"mx_rl_\w+", OPERATIONS)) == real


def test_log_fields() -> None:
    section = OPERATIONS.split("## Logs")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert set(logs.FIELDS) <= named
