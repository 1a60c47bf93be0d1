"""Providers of AWS credentials that never answer: who asks goes on after a while, and it mends by itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest

from proxy import provider_chain
from proxy.provider_chain import GIVE_UP_SECONDS, MOST_SILENT, Find, ProviderChain, SilentProvider
from tests.support.clock import ManualClock
from tests.support.wire import eventually
from tests.support.workers import is_gone

SOON = 0.02


class Silent:
    """Chains that do not answer before they are told to; of each what it finds is its number."""

    def __init__(self) -> None:
        self.made = 0
        self.asked: list[int] = []
        self.speaks = [threading.Event() for _ in range(100)]

    def __call__(self) -> Find:
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


async def test_who_asks_is_told_after_a_while_and_no_more_are_asked(silent: Silent) -> None:
    chain = ProviderChain(silent)
    told = await asyncio.gather(*(chain.found(SOON) for _ in range(20)), return_exceptions=True)
    assert {str(each) for each in told} == {f"no answer in {SOON:g} seconds"}
    assert all(isinstance(each, SilentProvider) for each in told)
    assert silent.asked == [0]
    silent.speaks[0].set()
    assert await chain.found() == 0  # what came late
    assert silent.asked == [0]
    assert await chain.found() == 0
    assert silent.asked == [0, 0]


async def test_in_time_another_is_asked_and_only_so_many_that_say_nothing(silent: Silent) -> None:
    clock = ManualClock()
    chain = ProviderChain(silent, clock.monotonic)
    for _ in range(3 * MOST_SILENT):
        with pytest.raises(SilentProvider):
            await chain.found(SOON)
        await clock.advance(GIVE_UP_SECONDS + 1)
    assert silent.asked == list(range(MOST_SILENT + 1))
    silent.speaks[1].set()
    silent.speaks[MOST_SILENT + 1].set()
    await eventually(lambda: len(chain._silent) < MOST_SILENT)
    assert await chain.found() == MOST_SILENT + 1


async def test_another_one_is_asked_at_once_where_what_was_found_is_of_no_use(silent: Silent) -> None:
    chain = ProviderChain(silent)
    with pytest.raises(SilentProvider):
        await chain.found(SOON)
    await chain.anew()
    silent.speaks[1].set()
    assert await chain.found() == 1


async def test_what_fails_is_raised_whoever_waits_by_then() -> None:
    def broken() -> Any:
        raise OSError("the disk")

    chain = ProviderChain(lambda: broken)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk"):
            await chain.found()


async def test_a_command_that_hangs_is_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs = tmp_path / "hangs"
    hangs.touch()
    keys = '{"Version": 1, "AccessKeyId": "FROMCOMMAND", "SecretAccessKey": "secret"}'
    command = tmp_path / "command"
    command.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\n[ -e {hangs} ] && exec sleep 60\necho '{keys}'\n")
    command.chmod(0o700)
    (tmp_path / "aws").write_text(f"[default]\ncredential_process = {command}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(provider_chain, "COMMAND_SECONDS", 0.5)
    chain = ProviderChain()
    with pytest.raises(TimeoutExpired):
        await chain.found()
    assert is_gone(int((tmp_path / "pid").read_text()))
    hangs.unlink()
    assert (await chain.found()).access_key == "FROMCOMMAND"
