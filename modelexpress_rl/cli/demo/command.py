"""`mx-rl demo`: the main job on real parts, and the proof that the bytes are right."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import anyio
from rich.console import Console

from modelexpress_rl.cli.demo import options as demo_options
from modelexpress_rl.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    demo_options.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run the demo; the exit code is 0 only if every step was proven.

    Raises:
        UsageError: an option does not fit, or a package that it needs is missing.
    """
    chosen = demo_options.parse(options)
    _require("torch", "torch", "the demo's models are made of torch tensors")
    _require("nixl", "nixl", "weights are read over NIXL")
    if chosen.trainer == "megatron":
        _require("megatron.core", "megatron", "or try `mx-rl demo --trainer toy`, which needs no Megatron")
    from modelexpress_rl.cli.demo.orchestrator import Orchestrator

    return 0 if anyio.run(Orchestrator(chosen, Console()).run) else 1


def _require(module: str, extra: str, why: str) -> None:
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise UsageError(f"{module} is not installed: pip install 'modelexpress-rl[{extra}]' ({why})")
