"""Clients' secrets in tests: hashes that cost next to nothing, and stores that lose answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import bcrypt
import pytest
from price_keeper.auth.registering import IssuedSecret, register
from price_keeper.auth.retrieval import retrieve
from price_keeper.clock import Clock
from price_keeper.errors import StoreUnavailable
from price_keeper.model import Scope
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Store

_GENSALT = bcrypt.gensalt


def cheap_hashes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bcrypt, "gensalt", lambda: _GENSALT(4))


def new_scope(app: str | None = "web") -> Scope:
    """An org of the test's own, the servers' tables being shared by all tests."""
    return Scope(str(uuid4()), app)


async def made(store: Store, scope: Scope) -> Scope:
    key = schema.org_config_key(scope.org) if scope.app is None else schema.app_config_key(scope.org, scope.app)
    await store.put(Put(key, {"org_name": "Acme", "version": 1}))
    return scope


async def registered(store: Store, clock: Clock, scope: Scope) -> IssuedSecret:
    issued = await register(store, clock, await made(store, scope))
    assert issued is not None
    return issued


async def first_secret(store: Store, clock: Clock, scope: Scope) -> str:
    return await retrieve(store, clock, scope, (await registered(store, clock, scope)).retrieval_token)


class Meddling:
    """A store that does something before or after its verbs, by name; what these raise goes to the caller."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.after: dict[str, Callable[[], Awaitable[None]]] = {}
        self.asked: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        async def meddled(*arguments: Any, **options: Any) -> Any:
            self.asked.append(verb)
            if (before := self.before.pop(verb, None)) is not None:
                await before()
            answer = await getattr(self._store, verb)(*arguments, **options)
            if (after := self.after.pop(verb, None)) is not None:
                await after()
            return answer

        return meddled


async def lose_the_answer() -> None:
    raise StoreUnavailable("by the test", maybe_applied=True)


async def be_away() -> None:
    raise StoreUnavailable("by the test")
