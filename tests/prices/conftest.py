"""The oracle's prices beside those that LiteLLM publishes: `make test-prices` installs it and compares them."""

from __future__ import annotations

import os

# A run of its own: LiteLLM is installed only with the clients, and a newer one may have other prices.
collect_ignore_glob = [] if "PRICE_KEEPER_TEST_PRICES" in os.environ else ["test_*.py"]
