"""These tests need `transformers` (extra `huggingface`), which the tests' own extra does not bring."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("transformers") else ["test_models.py"]
