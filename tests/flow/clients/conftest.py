"""Real clients, in environments of their own: `make test-clients` installs and runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.flow.clients.measuring import Measured, measured_all
from tests.support.client_stage import ClientStage, stage
from tests.support.clients import Client
from tests.support.counting_proxy import CountingProxies

# A run of its own: it takes minutes, and environments that a newcomer does not have.
collect_ignore_glob = [] if "PRICE_KEEPER_TEST_CLIENTS" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientStage]:
    with stage(tmp_path_factory.mktemp("stage")) as running:
        yield running


@pytest.fixture(scope="session")
def doors() -> Iterator[CountingProxies]:
    with CountingProxies().running() as opened:
        yield opened


@pytest.fixture(scope="session")
def measured(staged: ClientStage, doors: CountingProxies) -> dict[Client, Future[Measured]]:
    """What every client that is installed does."""
    return measured_all(staged, doors)
