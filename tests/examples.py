"""How many examples random geometries and hostile bytes get: 300 of each, and 10,000 by `make nightly`."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline for one of them, because a busy machine is no failure.
settings.register_profile(
    "geometry", max_examples=int(os.environ.get("MX_TEST_EXAMPLES", "300")), deadline=None
)
many = settings(settings.get_profile("geometry"))
