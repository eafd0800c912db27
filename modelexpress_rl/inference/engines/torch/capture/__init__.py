"""Captures what a module's own `load_weights` reads and where it puts it, without touching the module."""

from modelexpress_rl.inference.engines.torch.capture.captured import Captured, CapturedCopy
from modelexpress_rl.inference.engines.torch.capture.errors import CaptureRefused
from modelexpress_rl.inference.engines.torch.capture.run import Load, capture, load_weights

__all__ = ["CaptureRefused", "Captured", "CapturedCopy", "Load", "capture", "load_weights"]
