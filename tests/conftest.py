from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from uuid import uuid4

import aiohttp
import botocore.session
import pytest
from bedrock_simulator import DEFAULT_KEYS, SimulatedBedrock
from botocore.httpsession import get_cert_path
from price_keeper.stores.contract import Store
from price_keeper.telemetry.logs import ROOT_LOGGER, store_reads

from tests.support import effort
from tests.support import engines as known
from tests.support.engines import Engines
from tests.support.servers import ministack_server, moto_server
from tests.support.simulated import BotoCaller, open_caller, simulated_bedrock

effort.load_profile()


def pytest_report_header() -> list[str]:
    apart = {
        "real clients": "clients",
        "prices beside LiteLLM's": "prices",
        "the status page in a browser": "page",
        "Helm chart, image and linters": "deploy",
    }
    examples = f"random, seed {effort.seed()}" if effort.IS_EXPLORING else "the same on every machine"
    return [f"examples of property tests: {examples}"] + [
        f"{what}: included"
        if f"PRICE_KEEPER_TEST_{name.upper()}" in os.environ
        else f"{what}: left out; run with make test-{name}"
        for what, name in apart.items()
    ]


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of the tests and of the processes they start, unless an endpoint beyond this machine is tried as well.

    One authority of all the world's is trusted: to read them all takes longer than to open a client, and to start a
    process a tenth of its time. Where TLS is tried, it is with authorities of the test's own.
    """
    first, end, _ = Path(get_cert_path(True)).read_text().partition("-----END CERTIFICATE-----\n")
    authority = tmp_path_factory.mktemp("trust") / "authority.pem"
    authority.write_text(first + end)
    trust = {"AWS_CA_BUNDLE": str(authority), "SSL_CERT_FILE": str(authority), "SSL_CERT_DIR": str(authority.parent)}
    with pytest.MonkeyPatch.context() as patch:
        if known.OWN_ENDPOINT not in os.environ:
            for name, value in (known.TEST_CREDENTIALS | trust).items():
                patch.setenv(name, value)
        yield


@pytest.fixture(scope="session", autouse=True)
def _models_read_once() -> Iterator[None]:
    """Each session of botocore would read the models of AWS's services again, which takes most of what opening a client
    does; and the tests open a thousand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", cache(botocore.session.create_loader))
        yield


@pytest.fixture(autouse=True)
def _logging_is_as_in_a_new_process() -> None:
    """No incident goes on, and no earlier command has set a level."""
    logging.getLogger(ROOT_LOGGER).setLevel(logging.NOTSET)
    store_reads.__init__(store_reads._log, store_reads._now)  # type: ignore[misc]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as running:
        endpoints = {
            "moto": running.enter_context(moto_server(folder)),
            "ministack": running.enter_context(ministack_server(folder)),
        }
        if known.OWN_ENDPOINT in os.environ:
            endpoints["endpoint"] = os.environ[known.OWN_ENDPOINT]
        yield Engines(endpoints)


@pytest.fixture(params=known.ALL)
async def store(request: pytest.FixtureRequest, engines: Engines, tmp_path: Path) -> AsyncIterator[Store]:
    async with engines.open(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture(params=known.EXACT)
async def exact_store(request: pytest.FixtureRequest, engines: Engines, tmp_path: Path) -> AsyncIterator[Store]:
    """Engines that remember transactions' tokens and isolate concurrent transactions."""
    async with engines.open(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture
def pk() -> str:
    """A partition of the test's own, the servers' tables being shared by all tests."""
    return f"TEST#{uuid4()}"


@pytest.fixture
async def simulator() -> AsyncIterator[SimulatedBedrock]:
    async with simulated_bedrock() as running:
        yield running


@pytest.fixture
async def ask_simulator(simulator: SimulatedBedrock) -> AsyncIterator[BotoCaller]:
    async with open_caller(simulator.url) as caller:
        yield caller


@pytest.fixture
async def simulator_session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {DEFAULT_KEYS.bearer}"}) as session:
        yield session
