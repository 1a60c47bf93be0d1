"""AWS credentials of the store: none, late, refused, and of an account that has endpoints of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from price_keeper.errors import StoreAccessDenied, StoreUnavailable
from price_keeper.stores import dynamodb, dynamodb_credentials
from price_keeper.stores.contract import Key, Update
from price_keeper.stores.dynamodb import DynamoStore

from tests.support.engines import PREFIX, Engines
from tests.support.fault_proxy import FaultProxy, dynamodb_error, fault_proxy
from tests.support.hanging_command import hanging_command


@dataclass
class Rig:
    proxy: FaultProxy
    direct: DynamoStore
    key: Key

    @property
    def addition(self) -> Update:
        return Update(self.key, add={"n": 1})

    async def counted(self) -> int:
        found = await self.direct.get(self.key, consistent=True)
        return int((found or {}).get("n", 0))  # type: ignore[call-overload]


@pytest.fixture
async def rig(engines: Engines, tmp_path: Path, pk: str) -> AsyncIterator[Rig]:
    async with engines.open("ministack", tmp_path) as direct, fault_proxy(engines.endpoints["ministack"]) as proxy:
        assert isinstance(direct, DynamoStore)
        yield Rig(proxy, direct, Key("rate-buckets", pk, "BUCKET#rpm"))


async def _store(endpoint: str | None) -> DynamoStore:
    return await DynamoStore(region="us-east-1", table_prefix=PREFIX, endpoint=endpoint, sleep=_never).open()


async def _never(seconds: float) -> None:
    raise AssertionError(f"nothing to wait for, yet {seconds} s were asked")


async def test_missing_credentials_are_reported(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    store = await _store(rig.proxy.url)
    with pytest.raises(StoreAccessDenied, match="credentials"):
        await store.update(rig.addition)
    await store.close()


async def test_hanging_provider_delays_no_call_while_credentials_are_valid(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nine minutes before their end, when botocore itself has every call wait for newer ones."""
    assert await rig.counted() == 0  # with other credentials
    command, hangs = hanging_command(tmp_path, "a-token", 540)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(command))
    monkeypatch.setattr(dynamodb_credentials, "RENEWAL_WAIT_SECONDS", 0.05)
    store = await _store(rig.proxy.url)
    await store.update(rig.addition)
    hangs.touch()
    for name in ("RENEW_INTERVAL_SECONDS", "RETRY_SECONDS"):  # each call asks for newer ones
        monkeypatch.setattr(dynamodb_credentials, name, 0.0)
    async with asyncio.timeout(dynamodb.CALL_TIMEOUT_SECONDS / 2):
        for _ in range(3):
            await asyncio.gather(*(store.update(rig.addition) for _ in range(10)))
    assert await rig.counted() == 31
    hangs.unlink()
    await store.close()


@pytest.mark.parametrize("code", ["ExpiredTokenException", "UnrecognizedClientException", "InvalidSignatureException"])
async def test_refused_credentials_are_reloaded_from_their_source(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str
) -> None:
    """A file is read only once by botocore, whatever is put into it later."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "file"))
    file, signed = tmp_path / "file", list[str]()
    file.write_text("[default]\naws_access_key_id = FIRST\naws_secret_access_key = secret\n")
    store = await _store(rig.proxy.url)
    store.client.meta.events.register(
        "before-send.dynamodb", lambda request, **_: signed.append(str(request.headers["Authorization"]))
    )
    file.write_text("[default]\naws_access_key_id = SECOND\naws_secret_access_key = secret\n")
    await store.update(rig.addition)
    rig.proxy.plan([dynamodb_error(code)])
    with pytest.raises(StoreAccessDenied, match=code):
        await store.update(rig.addition)
    await store.update(rig.addition)
    assert ["FIRST" in each for each in signed] == [True, True, False]
    assert ["SECOND" in each for each in signed] == [False, False, True]
    await store.close()


async def test_account_endpoint_follows_from_credentials(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By it AWS has endpoints, which an operator may demand."""
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ACCOUNT_ID", "123456789012")
    monkeypatch.setenv("AWS_ACCOUNT_ID_ENDPOINT_MODE", "required")
    store = await _store(None)
    asked = list[str]()

    def stop(request: Any, **_: Any) -> None:
        asked.append(str(request.url))
        raise ArithmeticError

    store.client.meta.events.register("before-send.dynamodb", stop)
    with pytest.raises(StoreUnavailable):
        await store.update(rig.addition)
    assert asked == ["https://123456789012.ddb.us-east-1.amazonaws.com/"]
    await store.close()
