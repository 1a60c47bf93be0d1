"""Secrets that are fetched once: by one, in time, with the token alone, and never again."""

from __future__ import annotations

import asyncio
import base64
import logging
from pathlib import Path
from typing import Any

import pytest
from price_keeper.auth import registration as module
from price_keeper.auth.client_secrets import client_item_key
from price_keeper.auth.registration import RETRIEVAL_SECONDS, RETRIEVED_AT, retrieve
from price_keeper.domain import build_client_id
from price_keeper.errors import AccessDenied, Busy
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Item, Put, Store
from price_keeper.stores.dynamodb import DynamoStore

from tests.support.client_secrets import (
    InterceptingStore,
    new_scope,
    raise_answer_lost,
    raise_unavailable,
    register_scope,
    use_cheap_hashes,
)
from tests.support.clock import ManualClock
from tests.support.engines import PREFIX, Engines
from tests.support.fault_proxy import CutAnswer, DropAnswer, Fault, Pass, Reset, fault_proxy
from tests.support.memory_store import MemoryStore


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cheap_hashes(monkeypatch)


def row_of(store: MemoryStore) -> tuple[Any, dict[str, Any]]:
    ((key, item),) = [each for each in store.items.items() if each[0].table == "secret-retrieval-tokens"]
    return key, dict(item)


async def test_concurrent_retrievals_have_one_winner(store: Store, clock: ManualClock) -> None:
    scope = new_scope()
    issued = await register_scope(store, clock, scope)
    every = [retrieve(store, clock, scope, issued.retrieval_token) for _ in range(100)]
    found = await asyncio.gather(*every, return_exceptions=True)
    secrets = [each for each in found if isinstance(each, str)]
    assert [len(base64.b64decode(each)) for each in secrets] == [32]
    assert {type(each) for each in found if not isinstance(each, str)} == {module.RetrievalRefused}
    with pytest.raises(AccessDenied, match="rotate"):
        await retrieve(store, clock, scope, issued.retrieval_token)


@pytest.mark.parametrize("app", ["web", None])
async def test_retrieval_row_says_whose_secret_it_is_and_after_its_use_when_without_the_ciphertext(
    store: Store, clock: ManualClock, app: str | None
) -> None:
    scope = new_scope(app)
    began = int(clock.now())
    issued = await register_scope(store, clock, scope)
    key = schema.retrieval_token_key(module._derive(issued.retrieval_token, module._ROW_LABEL).hex())
    expected = {
        "org_id": scope.org,
        **({"app_id": app} if app else {}),
        "secret_type": "app" if app else "org",
        "client_id": build_client_id(scope.org, scope.app),
        "created_at_epoch": began,
        "expires_at_epoch": began + 600,
        "used": False,
    }
    row = dict(await store.get(key, consistent=True) or {})
    assert isinstance(row.pop("sealed"), bytes)
    assert row == expected
    await clock.advance(5)
    await retrieve(store, clock, scope, issued.retrieval_token)
    assert await store.get(key, consistent=True) == {**expected, "used": True, "used_at_epoch": began + 5}


async def test_refused_token_is_counted_as_reused_expired_or_unknown_and_answered_alike(clock: ManualClock) -> None:
    store, scope, other = MemoryStore(), new_scope(), new_scope()
    used, late = await register_scope(store, clock, scope), await register_scope(store, clock, other)
    await retrieve(store, clock, scope, used.retrieval_token)
    await clock.advance(RETRIEVAL_SECONDS)
    told = []
    for asked_for, token in (
        (scope, used.retrieval_token),
        (other, late.retrieval_token),
        (scope, late.retrieval_token),
        (scope, module.seal_secret(scope, "x", 0).token),
        (scope, "no token"),
    ):
        with pytest.raises(module.RetrievalRefused) as refused:
            await retrieve(store, clock, asked_for, token)
        told.append(refused.value)
    assert [each.reason for each in told] == ["reused", "expired", "unknown", "unknown", "unknown"]
    assert len({each.message for each in told}) == 1


async def test_used_row_leaves_no_ciphertext_in_the_store(clock: ManualClock) -> None:
    store, scope = MemoryStore(), new_scope()
    issued = await register_scope(store, clock, scope)
    sealed = row_of(store)[1]["sealed"]
    await retrieve(store, clock, scope, issued.retrieval_token)
    assert repr(sealed) not in repr(store.items)


@pytest.mark.parametrize(
    ("waited", "is_good"), [(RETRIEVAL_SECONDS - 1, True), (RETRIEVAL_SECONDS, False), (10 * RETRIEVAL_SECONDS, False)]
)
async def test_retrieval_expires_after_ten_minutes(
    store: Store, clock: ManualClock, waited: float, is_good: bool
) -> None:
    """Expired rows are still there: no engine deletes them at once."""
    scope = new_scope()
    issued = await register_scope(store, clock, scope)
    assert issued.expires == int(clock.now()) + RETRIEVAL_SECONDS
    await clock.advance(waited)
    if is_good:
        assert await retrieve(store, clock, scope, issued.retrieval_token)
    else:
        with pytest.raises(AccessDenied, match="ten minutes"):
            await retrieve(store, clock, scope, issued.retrieval_token)


async def test_retrieval_is_bound_to_its_client(store: Store, clock: ManualClock) -> None:
    scope, other = new_scope("web"), new_scope("web")
    issued = await register_scope(store, clock, scope)
    await register_scope(store, clock, other)
    for wrong in (other, new_scope(), type(scope)(scope.org), type(scope)(scope.org, "web2")):
        with pytest.raises(AccessDenied):
            await retrieve(store, clock, wrong, issued.retrieval_token)
    assert await retrieve(store, clock, scope, issued.retrieval_token)


async def test_row_copied_to_other_client_cannot_be_decrypted(clock: ManualClock) -> None:
    """By an attacker who may write to the store: the encryption binds the secret to its client as well."""
    store, scope, other = MemoryStore(), new_scope(), new_scope()
    issued = await register_scope(store, clock, scope)
    key, row = row_of(store)
    await store.put(Put(key, {**row, "client_id": build_client_id(other.org, other.app)}))
    with pytest.raises(AccessDenied):
        await retrieve(store, clock, other, issued.retrieval_token)


@pytest.mark.parametrize(
    "change",
    [
        {"sealed": b""},
        {"sealed": b"short"},
        {"sealed": "text"},
        {"sealed": bytes(100)},
        {"sealed": None},
        {EXPIRY_ATTRIBUTE: "never"},
        {EXPIRY_ATTRIBUTE: None},
    ],
)
async def test_malformed_row_gives_nothing(clock: ManualClock, change: dict[str, Any]) -> None:
    store, scope = MemoryStore(), new_scope()
    issued = await register_scope(store, clock, scope)
    key, row = row_of(store)
    await store.put(Put(key, {name: value for name, value in {**row, **change}.items() if value is not None}))
    with pytest.raises(AccessDenied, match="rotate"):
        await retrieve(store, clock, scope, issued.retrieval_token)


async def test_every_bit_of_sealed_secret_is_authenticated(clock: ManualClock) -> None:
    store, scope = MemoryStore(), new_scope()
    issued = await register_scope(store, clock, scope)
    key, row = row_of(store)
    for place in range(len(row["sealed"])):
        corrupted = bytearray(row["sealed"])
        corrupted[place] ^= 1
        await store.put(Put(key, {**row, "sealed": bytes(corrupted)}))
        with pytest.raises(AccessDenied):
            await retrieve(store, clock, scope, issued.retrieval_token)
    await store.put(Put(key, row))
    assert await retrieve(store, clock, scope, issued.retrieval_token)


@pytest.mark.parametrize("token", ["", "x", "A" * 42, "A" * 44, "A" * 42 + "+", "A" * 42 + "\n", "é" * 43, "A" * 10**6])
async def test_malformed_token_needs_no_read(clock: ManualClock, token: str) -> None:
    asked = InterceptingStore(MemoryStore())
    with pytest.raises(AccessDenied):
        await retrieve(asked, clock, new_scope(), token)  # type: ignore[arg-type]
    assert asked.calls == []


async def test_store_contains_neither_secret_nor_token(clock: ManualClock) -> None:
    store, scope = MemoryStore(), new_scope()
    issued = await register_scope(store, clock, scope)
    kept = repr(store.items)
    token = issued.retrieval_token
    secret = await retrieve(store, clock, scope, token)
    raw_token, raw_secret = base64.urlsafe_b64decode(token + "="), base64.b64decode(secret)
    assert len(raw_token) == 32
    for known in (token, secret, repr(raw_token)[2:-1], repr(raw_secret)[2:-1], raw_token.hex(), raw_secret.hex()):
        assert known not in kept
    assert module._derive(token, module._ROW_LABEL) != module._derive(token, module._KEY_LABEL)
    assert module._derive(token, module._KEY_LABEL).hex() not in kept


async def test_tokens_and_keys_are_fresh_each_time(clock: ManualClock) -> None:
    scope = new_scope()
    sealed = [module.seal_secret(scope, "the same", clock.now()) for _ in range(100)]
    assert len({each.token for each in sealed}) == len({each.row for each in sealed}) == 100
    assert len({bytes(each.put.item["sealed"]) for each in sealed}) == 100  # type: ignore[arg-type]


async def test_repr_shows_no_secret(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    store, scope = InterceptingStore(MemoryStore()), new_scope()
    texts = []
    with caplog.at_level(logging.DEBUG):
        issued = await register_scope(store, clock, scope)  # type: ignore[arg-type]
        store.before["exchange"] = raise_unavailable
        for _ in range(3):
            try:
                secret = await retrieve(store, clock, scope, issued.retrieval_token)  # type: ignore[arg-type]
            except (AccessDenied, Busy) as refused:
                texts += [repr(refused), str(refused), repr(refused.__cause__), repr(refused.__suppress_context__)]
    sealed = module.seal_secret(scope, secret, clock.now())
    texts += [repr(issued), repr(sealed), caplog.text]
    for hidden in (secret, issued.retrieval_token, sealed.token, repr(sealed.put.item["sealed"])):
        assert all(hidden not in each for each in texts)
    assert len(texts) == 4 + 4 + 3


async def test_invented_token_costs_one_read_and_no_write(clock: ManualClock) -> None:
    memory, scope = MemoryStore(), new_scope()
    await register_scope(memory, clock, scope)
    store = InterceptingStore(memory)
    with pytest.raises(AccessDenied):
        await retrieve(store, clock, scope, module.seal_secret(scope, "x", clock.now()).token)  # type: ignore[arg-type]
    assert store.calls == ["get"]


# When answers are lost.


async def test_lost_retrieval_answer_loses_secret_and_never_repeats_it(clock: ManualClock) -> None:
    store, scope = InterceptingStore(MemoryStore()), new_scope()
    issued = await register_scope(store, clock, scope)  # type: ignore[arg-type]
    store.after["exchange"] = raise_answer_lost
    with pytest.raises(Busy, match=r"try once more.* rotate"):
        await retrieve(store, clock, scope, issued.retrieval_token)  # type: ignore[arg-type]
    with pytest.raises(AccessDenied, match="rotate"):
        await retrieve(store, clock, scope, issued.retrieval_token)  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["get", "update", "exchange"])
async def test_store_outage_keeps_secret_retrievable(clock: ManualClock, verb: str) -> None:
    store, scope = InterceptingStore(MemoryStore()), new_scope()
    issued = await register_scope(store, clock, scope)  # type: ignore[arg-type]
    store.before[verb] = raise_unavailable
    with pytest.raises(Busy, match="stays valid"):
        await retrieve(store, clock, scope, issued.retrieval_token)  # type: ignore[arg-type]
    assert await retrieve(store, clock, scope, issued.retrieval_token)  # type: ignore[arg-type]


async def test_lost_answer_without_effect_can_be_repeated(clock: ManualClock) -> None:
    store, scope = InterceptingStore(MemoryStore()), new_scope()
    issued = await register_scope(store, clock, scope)  # type: ignore[arg-type]
    store.before["exchange"] = raise_answer_lost
    with pytest.raises(Busy, match="try once more"):
        await retrieve(store, clock, scope, issued.retrieval_token)  # type: ignore[arg-type]
    assert await retrieve(store, clock, scope, issued.retrieval_token)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [DropAnswer(), Reset(), CutAnswer()])
@pytest.mark.parametrize("engine", ["moto", "ministack"])
async def test_lost_answers_on_the_wire_lose_secret(
    engines: Engines, engine: str, fault: Fault, tmp_path: Path, clock: ManualClock
) -> None:
    scope = new_scope()
    async with engines.open(engine, tmp_path) as direct, fault_proxy(engines.endpoints[engine]) as between:
        issued = await register_scope(direct, clock, scope)
        lossy_store = await DynamoStore(
            region="us-east-1", table_prefix=PREFIX, endpoint=between.url, sleep=asyncio.sleep
        ).open()
        try:
            between.plan([Pass(), Pass(), fault])
            with pytest.raises(Busy, match="rotate"):
                await retrieve(lossy_store, clock, scope, issued.retrieval_token)
            assert between.requests == 3  # a lost answer is not asked for again: it would find nothing
            with pytest.raises(AccessDenied, match="rotate"):
                await retrieve(lossy_store, clock, scope, issued.retrieval_token)
        finally:
            await lossy_store.close()


# The mark by which a rotation knows whether anybody can have the secret.


async def marked(store: Store, scope: Any) -> bool:
    item: Item | None = await store.get(client_item_key(scope), consistent=True)
    assert item is not None
    return RETRIEVED_AT in item


async def test_secret_is_marked_as_retrieved_before_it_is_returned(clock: ManualClock) -> None:
    memory, scope = MemoryStore(), new_scope()
    store = InterceptingStore(memory)
    issued = await register_scope(memory, clock, scope)
    assert not await marked(memory, scope)
    store.before["exchange"] = raise_unavailable
    with pytest.raises(Busy):
        await retrieve(store, clock, scope, issued.retrieval_token)  # type: ignore[arg-type]
    assert await marked(memory, scope)
    assert await retrieve(store, clock, scope, issued.retrieval_token)  # type: ignore[arg-type]


async def test_wrong_or_late_retrieval_leaves_no_mark(store: Store, clock: ManualClock) -> None:
    scope = new_scope()
    issued = await register_scope(store, clock, scope)
    with pytest.raises(AccessDenied):
        await retrieve(store, clock, scope, module.seal_secret(scope, "x", 0).token)
    await clock.advance(RETRIEVAL_SECONDS)
    with pytest.raises(AccessDenied):
        await retrieve(store, clock, scope, issued.retrieval_token)
    assert not await marked(store, scope)
    nowhere = new_scope()
    with pytest.raises(AccessDenied):
        await retrieve(store, clock, nowhere, issued.retrieval_token)
    assert await store.get(schema.app_config_key(nowhere.org, "web"), consistent=True) is None
