"""The world of the generator's tests: a control plane, trainers and generators in this process."""

from __future__ import annotations

from tests.inference.conftest import control, hub, plane, world

__all__ = ["control", "hub", "plane", "world"]
