"""Fixtures that several files of this folder share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.control_harness import ControlHarness, open_control_harness
from tests.support.engines import Engines
from tests.support.price_fleet import PriceFleet, open_fleet
from tests.support.simulated import BedrockProcess, bedrock_process


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ControlHarness]:
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path) as running:
        yield running


@pytest.fixture
def bedrock() -> Iterator[BedrockProcess]:
    with bedrock_process() as running:
        yield running


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[PriceFleet]:
    async with open_fleet(tmp_path) as opened:
        yield opened
