"""Capture of FSDP2 and DTensor shards, and of plain tensors: boxes of what a rank holds."""

from __future__ import annotations

from modelexpress_rl.train.engines.fsdp.context import FSDPTrainerContext

__all__ = ["FSDPTrainerContext"]
