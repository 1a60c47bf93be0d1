"""A revoked token at the data port, and a store that cannot say what is revoked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.clock import SystemClock
from price_keeper.errors import StoreUnavailable
from price_keeper.stores import schema
from price_keeper.stores.contract import Put

from tests.support.data_port import SECRET, DataPort, data_port

ASKED = {"messages": [{"role": "user", "content": [{"text": "hello"}]}], "inferenceConfig": {"maxTokens": 5}}


async def called(port: DataPort) -> str:
    """`ok`, or the error's code and message."""
    try:
        await asyncio.to_thread(lambda: port.client().converse(modelId="premium", **ASKED))
    except ClientError as refused:
        return f"{refused.response['Error']['Code']}: {refused.response['Error']['Message']}"
    return "ok"


class StoreWithoutRevocations:
    """The store, but for one table."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get_many(self, keys: Any, *, consistent: bool = False) -> Any:
        if any(key.table == "revoked-tokens" for key in keys):
            raise StoreUnavailable("away")
        return await self._store.get_many(keys, consistent=consistent)


async def test_revoked_token_is_refused(tmp_path: Path) -> None:
    async with data_port(tmp_path) as port:
        tokens = TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", SystemClock().now)
        claims = tokens.verify_access(port.token)
        await port.store.put(Put(schema.revoked_token_key(claims.jti), {"expires_at_epoch": claims.expires}))
        assert await called(port) == "AccessDeniedException: the token was revoked: ask for a new one"
        assert len(port.bedrock.ledger) == 0
        port.token = tokens.mint_access(claims.caller.org, claims.caller.app).token
        assert await called(port) == "ok"


@pytest.mark.parametrize("on_store_down", ["serve", "refuse"])
async def test_unknown_revocation_follows_policy(tmp_path: Path, on_store_down: str) -> None:
    async with data_port(tmp_path, StoreWithoutRevocations, on_store_down=on_store_down) as port:
        answer = await called(port)
        if on_store_down == "serve":
            assert answer == "ok"
        else:
            assert answer.startswith("ServiceUnavailableException: the store has not said for")
            assert len(port.bedrock.ledger) == 0
