"""Whether these tests run against compiled modules (`make test-compiled`), and what cannot be tested there."""

from __future__ import annotations

import os

import pytest

IS_COMPILED = os.environ.get("PRICE_KEEPER_COMPILED") == "1"

replaces_a_method = pytest.mark.skipif(
    IS_COMPILED, reason="puts another method in the place of one that compiled callers call directly"
)
