"""Clients' secrets in tests: hashes that cost next to nothing, and stores that lose answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import bcrypt
import pytest
from price_keeper.auth.registration import IssuedSecret, register, retrieve
from price_keeper.clock import Clock
from price_keeper.domain import Scope
from price_keeper.errors import StoreUnavailable
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Store

_GENSALT = bcrypt.gensalt


def use_cheap_hashes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bcrypt, "gensalt", lambda: _GENSALT(4))


def new_scope(app: str | None = "web") -> Scope:
    """An org of the test's own, the servers' tables being shared by all tests."""
    return Scope(str(uuid4()), app)


async def create_scope(store: Store, scope: Scope) -> Scope:
    key = schema.org_config_key(scope.org) if scope.app is None else schema.app_config_key(scope.org, scope.app)
    await store.put(Put(key, {"org_name": "Acme", "version": 1}))
    return scope


async def register_scope(store: Store, clock: Clock, scope: Scope) -> IssuedSecret:
    issued = await register(store, clock, await create_scope(store, scope))
    assert issued is not None
    return issued


async def first_secret(store: Store, clock: Clock, scope: Scope) -> str:
    return await retrieve(store, clock, scope, (await register_scope(store, clock, scope)).retrieval_token)


class InterceptingStore:
    """A store that does something before or after its verbs, by name; what these raise goes to the caller."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.after: dict[str, Callable[[], Awaitable[None]]] = {}
        self.calls: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        async def intercepted(*arguments: Any, **options: Any) -> Any:
            self.calls.append(verb)
            if (before := self.before.pop(verb, None)) is not None:
                await before()
            answer = await getattr(self._store, verb)(*arguments, **options)
            if (after := self.after.pop(verb, None)) is not None:
                await after()
            return answer

        return intercepted


async def raise_answer_lost() -> None:
    raise StoreUnavailable("by the test", maybe_applied=True)


async def raise_unavailable() -> None:
    raise StoreUnavailable("by the test")
