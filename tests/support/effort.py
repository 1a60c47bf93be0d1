"""How hard property tests try: as much as fits into `make test`, or many times that with `make fuzz-properties`."""

from __future__ import annotations

import os

_TIMES = int(os.environ.get("PRICE_KEEPER_EFFORT", "1"))


def tries(number: int) -> int:
    return number * _TIMES
