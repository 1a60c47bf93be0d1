"""What `make dist` made, installed from nothing. It downloads packages, so it is a run of its own: `make test-dist`."""

from __future__ import annotations

import os

collect_ignore = [] if "PRICE_KEEPER_TEST_DIST" in os.environ else ["test_dist.py"]
