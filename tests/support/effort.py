"""How hard property tests try.

`make test` tries the same examples on every machine: what it says of a commit does not depend on luck, and an example
that was found once stands in the test. `make fuzz-properties` explores: many times as many examples, drawn at random.
It sets `PRICE_KEEPER_EFFORT`, how many times, and `PRICE_KEEPER_SEED`, with which the same examples are drawn again.
`make test-fast` sets an effort below 1: fewer examples, and also the same on every machine.
"""

from __future__ import annotations

import os
import random

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

_EFFORT = os.environ.get("PRICE_KEEPER_EFFORT")
_TIMES = float(_EFFORT or 1)
IS_EXPLORING = _EFFORT is not None and _TIMES >= 1
_SEED = 20261119


def tries(number: int) -> int:
    return max(1, int(number * _TIMES))


def seed(*, is_exploring: bool = IS_EXPLORING) -> int:
    """Of what a test draws itself: always the same, unless another one is given, or the test explores."""
    given = os.environ.get("PRICE_KEEPER_SEED")
    if given is not None:
        return int(given)
    return random.randrange(10**6) if is_exploring else _SEED


def seeds(number: int) -> range:
    """Seeds of a test that plays whole worlds; `make test` begins at 0."""
    first = seed() if IS_EXPLORING else 0
    return range(first, first + tries(number))


def load_profile() -> None:
    """No example has a deadline, as no machine's speed is promised."""
    settings.register_profile(
        "exploring",
        max_examples=tries(100),  # of a test that does not say how many
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=False,
        database=None,
        print_blob=True,
    )
    settings.register_profile("same examples", settings.get_profile("exploring"), derandomize=True)
    settings.load_profile("exploring" if IS_EXPLORING else "same examples")
    if not IS_EXPLORING:
        # Hypothesis also draws the constants of all modules loaded so far, which depend on the tests that ran before.
        providers._get_local_constants = providers.Constants
