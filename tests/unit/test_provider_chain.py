"""Providers of AWS credentials that never answer: callers continue after a timeout, and the chain recovers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from functools import partial
from itertools import product
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest
from botocore.credentials import EnvProvider
from botocore.exceptions import PartialCredentialsError
from price_keeper import provider_chain
from price_keeper.provider_chain import (
    ABANDON_AFTER_SECONDS,
    MAX_ABANDONED,
    FindCredentials,
    ProviderChain,
    ProviderTimeout,
    read_environment,
)

from tests.support.clock import ManualClock
from tests.support.raw_clients import eventually
from tests.support.workers import has_exited

SOON = 0.02


class Silent:
    """Chains that answer on command; each finds its number."""

    def __init__(self) -> None:
        self.made = 0
        self.asked: list[int] = []
        self.speaks = [threading.Event() for _ in range(100)]

    def __call__(self) -> FindCredentials:
        number, self.made = self.made, self.made + 1

        def find() -> int:
            self.asked.append(number)
            assert self.speaks[number].wait(30)
            return number

        return find


@pytest.fixture
async def silent() -> AsyncIterator[Silent]:
    made = Silent()
    yield made
    for each in made.speaks:
        each.set()


async def test_silent_provider_times_out_and_is_not_asked_again_at_once(silent: Silent) -> None:
    chain = ProviderChain(silent)
    failures = await asyncio.gather(*(chain.load(SOON) for _ in range(20)), return_exceptions=True)
    assert {str(each) for each in failures} == {f"no answer in {SOON:g} seconds"}
    assert all(isinstance(each, ProviderTimeout) for each in failures)
    assert silent.asked == [0]
    silent.speaks[0].set()
    assert await chain.load() == 0  # what came late
    assert silent.asked == [0]
    assert await chain.load() == 0
    assert silent.asked == [0, 0]


async def test_abandoned_providers_are_bounded(silent: Silent) -> None:
    clock = ManualClock()
    chain = ProviderChain(silent, clock.monotonic)
    for _ in range(3 * MAX_ABANDONED):
        with pytest.raises(ProviderTimeout):
            await chain.load(SOON)
        await clock.advance(ABANDON_AFTER_SECONDS + 1)
    assert silent.asked == list(range(MAX_ABANDONED + 1))
    silent.speaks[1].set()
    silent.speaks[MAX_ABANDONED + 1].set()
    await eventually(lambda: len(chain._abandoned) < MAX_ABANDONED)
    assert await chain.load() == MAX_ABANDONED + 1


async def test_useless_credentials_ask_next_provider_at_once(silent: Silent) -> None:
    chain = ProviderChain(silent)
    with pytest.raises(ProviderTimeout):
        await chain.load(SOON)
    chain.replace()
    silent.speaks[1].set()
    assert await chain.load() == 1


async def test_concurrent_loads_share_next_provider(silent: Silent) -> None:
    clock = ManualClock()
    chain = ProviderChain(silent, clock.monotonic)
    with pytest.raises(ProviderTimeout):
        await chain.load(SOON)
    await clock.advance(ABANDON_AFTER_SECONDS + 1)
    silent.speaks[1].set()
    assert await asyncio.gather(*(chain.load() for _ in range(50))) == [1] * 50
    assert silent.asked == [0, 1]


async def test_slow_chain_construction_times_out() -> None:
    is_made = threading.Event()

    def make() -> FindCredentials:
        assert is_made.wait(30)
        return lambda: 1

    chain = ProviderChain(make)
    for _ in range(2):
        with pytest.raises(ProviderTimeout):
            await chain.load(SOON)
        chain.replace()
    is_made.set()
    assert await chain.load() == 1


def test_process_exits_although_provider_never_answers() -> None:
    code = """
import asyncio, threading
from price_keeper.provider_chain import ProviderChain, ProviderTimeout
chain = ProviderChain(lambda: threading.Event().wait)
try:
    asyncio.run(chain.load(0.01))
except ProviderTimeout as silence:
    print(silence)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "no answer in 0.01 seconds\n"


async def test_provider_failure_is_raised_to_later_waiter() -> None:
    def broken() -> Any:
        raise OSError("the disk")

    chain = ProviderChain(lambda: broken)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk"):
            await chain.load()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A command that hangs while there is this file; it and what it started itself write down who they are."""
    hangs = tmp_path / "hangs"
    hangs.touch()
    keys = '{"Version": 1, "AccessKeyId": "FROMCOMMAND", "SecretAccessKey": "secret"}'
    waits = f"sleep 60 & echo $! > {tmp_path}/child; wait"
    command = tmp_path / "command"
    command.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nif [ -e {hangs} ]; then {waits}; fi\necho '{keys}'\n")
    command.chmod(0o700)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:9")  # which must not be reached
    monkeypatch.setattr(provider_chain, "COMMAND_TIMEOUT_SECONDS", 0.5)
    return hangs


PROFILES = {
    "its own": "[default]\ncredential_process = {}\n",
    "of another profile": "[default]\nrole_arn = arn:aws:iam::123456789012:role/r\nsource_profile = other\n"
    "[profile other]\ncredential_process = {}\n",
}


@pytest.mark.parametrize("whose", PROFILES)
async def test_hanging_credential_command_is_killed_with_children(hanging: Path, whose: str) -> None:
    folder = hanging.parent
    (folder / "aws").write_text(PROFILES[whose].format(folder / "command"))
    with pytest.raises(TimeoutExpired):
        await ProviderChain().load()
    for each in ("pid", "child"):
        await eventually(partial(has_exited, int((folder / each).read_text())))


async def test_killed_credential_command_is_started_again(hanging: Path) -> None:
    (hanging.parent / "aws").write_text(PROFILES["its own"].format(hanging.parent / "command"))
    chain = ProviderChain()
    with pytest.raises(TimeoutExpired):
        await chain.load()
    await asyncio.to_thread(hanging.unlink)
    assert (await chain.load()).access_key == "FROMCOMMAND"


NAMES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SECURITY_TOKEN",
    "AWS_SESSION_TOKEN",
    "AWS_ACCOUNT_ID",
)


@pytest.mark.parametrize("values", [*product((None, "", "given"), repeat=len(NAMES))])
def test_environment_credentials_are_those_that_botocore_finds(values: tuple[str | None, ...]) -> None:
    given = dict(zip(NAMES, values, strict=True))
    environment = {name: value and f"{value}-{name}" for name, value in given.items() if value is not None}
    try:
        provided = EnvProvider(environment).load()
    except PartialCredentialsError:  # which the chain still raises, since botocore judges them
        provided = None
    found = read_environment(environment)
    assert (found is None) == (provided is None)
    if found is not None:
        assert found == tuple(provided.get_frozen_credentials())


def test_environment_credentials_that_expire_are_left_to_botocore() -> None:
    complete = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    assert read_environment(complete) is not None
    assert read_environment(complete | {"AWS_CREDENTIAL_EXPIRATION": "2030-01-01T00:00:00Z"}) is None


async def test_incomplete_environment_credentials_are_reported_by_botocore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with pytest.raises(PartialCredentialsError):
        await ProviderChain().load()


_LOADED = """
import asyncio, sys
from price_keeper.provider_chain import ProviderChain
print(asyncio.run(ProviderChain().load()).access_key, "botocore" in sys.modules)
"""


def test_chain_with_environment_credentials_does_not_load_botocore() -> None:
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    done = subprocess.run(
        [sys.executable, "-c", _LOADED], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["key", "False"]
