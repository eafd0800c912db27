"""The tests with SGLang's own model classes need a virtual environment of their own: see `real.py`."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("MX_TEST_SGLANG") else ["test_real_classes.py"]
