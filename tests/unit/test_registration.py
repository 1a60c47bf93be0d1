"""How clients get their secrets: once, all or nothing, despite concurrent writers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from price_keeper.auth import registration as module
from price_keeper.auth.client_secrets import (
    GRACE_ENDS_AT,
    PREVIOUS_SECRET_HASH,
    SECRET_CREATED_AT,
    SECRET_HASH,
    ClientVerifier,
    client_item_key,
)
from price_keeper.auth.registration import RETRIEVAL_ROW, RETRIEVED_AT, IssuedSecret, register, retrieve, rotate
from price_keeper.budgets.org_settings import put_app, put_org
from price_keeper.config.config_sections import DefaultsConfig
from price_keeper.domain import Scope, build_client_id
from price_keeper.errors import (
    AccessDenied,
    CancellationReason,
    NotFound,
    ReasonCode,
    StoreThrottled,
    StoreUnavailable,
    TransactionFailed,
    WriteConflict,
)
from price_keeper.stores import schema
from price_keeper.stores.contract import ConditionCheck, Item, ItemExists, Key, Put, Store

from tests.support.client_secrets import (
    InterceptingStore,
    create_scope,
    first_secret,
    new_scope,
    raise_answer_lost,
    raise_unavailable,
    register_scope,
    use_cheap_hashes,
)
from tests.support.clock import ManualClock
from tests.support.memory_store import MemoryStore

BODY: dict[str, Any] = {
    "org_name": "Acme",
    "timezone": "UTC",
    "quota_scope": "APP",
    "model_ordering": ["premium"],
    "quotas": {"premium": 5},
}


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cheap_hashes(monkeypatch)


async def item_of(store: Store, scope: Scope) -> Item:
    item = await store.get(client_item_key(scope), consistent=True)
    assert item is not None
    return item


async def is_good(store: Store, clock: ManualClock, scope: Scope, secret: str) -> bool:
    try:
        return await ClientVerifier(store, clock.now).verify(build_client_id(scope.org, scope.app), secret) == scope
    except AccessDenied:
        return False


async def put(store: Store, clock: ManualClock, scope: Scope, name: str = "Acme") -> None:
    await put_org(store, clock, scope.org, BODY | {"org_name": name}, ["premium"], DefaultsConfig())
    if scope.app is not None:
        await put_app(store, clock, scope.org, scope.app, {"app_name": name}, ["premium"])


@pytest.mark.parametrize("app", [None, "web"])
async def test_registration_after_put_issues_credentials_once(
    store: Store, clock: ManualClock, app: str | None
) -> None:
    scope = new_scope(app)
    await put(store, clock, scope)
    issued = await register(store, clock, scope)
    assert issued is not None
    assert issued.client_id == build_client_id(scope.org, app)
    kept = await item_of(store, scope)
    assert (kept["client_id"], kept[SECRET_CREATED_AT]) == (issued.client_id, int(clock.now()))
    assert not {PREVIOUS_SECRET_HASH, GRACE_ENDS_AT, RETRIEVED_AT} & kept.keys()
    await put(store, clock, scope, "Acme the second")
    assert await register(store, clock, scope) is None
    after = await item_of(store, scope)
    assert {name: after[name] for name in (SECRET_HASH, RETRIEVAL_ROW, "client_id")} == {
        name: kept[name] for name in (SECRET_HASH, RETRIEVAL_ROW, "client_id")
    }
    secret = await retrieve(store, clock, scope, issued.retrieval_token)
    assert await is_good(store, clock, scope, secret)


async def test_registration_of_unknown_scope_is_refused(store: Store, clock: ManualClock) -> None:
    for scope in (new_scope(), new_scope(None)):
        with pytest.raises(NotFound, match=f"there is no .*{scope.org}"):
            await register(store, clock, scope)
        with pytest.raises(NotFound):
            await rotate(store, clock, scope, 0)
        assert await store.get(client_item_key(scope), consistent=True) is None
        await create_scope(store, scope)
        with pytest.raises(NotFound, match="no credentials to rotate"):
            await rotate(store, clock, scope, 0)


async def test_concurrent_registrations_have_one_winner(exact_store: Store, clock: ManualClock) -> None:
    scope = await create_scope(exact_store, new_scope())
    found = await asyncio.gather(*(register(exact_store, clock, scope) for _ in range(20)))
    (issued,) = [each for each in found if each is not None]
    secret = await retrieve(exact_store, clock, scope, issued.retrieval_token)
    assert await is_good(exact_store, clock, scope, secret)


async def test_concurrent_rotations_have_one_winner(exact_store: Store, clock: ManualClock) -> None:
    scope = new_scope()
    old = await first_secret(exact_store, clock, scope)
    every = [rotate(exact_store, clock, scope, 24) for _ in range(20)]
    found = await asyncio.gather(*every, return_exceptions=True)
    (issued,) = [each for each in found if isinstance(each, IssuedSecret)]
    assert {type(each) for each in found} == {IssuedSecret, WriteConflict}
    new = await retrieve(exact_store, clock, scope, issued.retrieval_token)
    assert [await is_good(exact_store, clock, scope, each) for each in (old, new)] == [True, True]


async def test_concurrent_settings_and_secret_changes_are_both_kept(exact_store: Store, clock: ManualClock) -> None:
    scope = new_scope(None)
    await put(exact_store, clock, scope)
    waiting = True

    async def time_passes() -> None:
        while waiting:
            await clock.advance(0.3)
            await asyncio.sleep(0.01)

    passing = asyncio.create_task(time_passes())
    puts = [put(exact_store, clock, scope, f"Acme {number}") for number in range(5)]
    issued, *_ = await asyncio.gather(register(exact_store, clock, scope), *puts)
    first = (await item_of(exact_store, scope))[SECRET_HASH]
    again = [put(exact_store, clock, scope, f"Acme {number}") for number in range(5)]
    await asyncio.gather(rotate(exact_store, clock, scope, 1), *again)
    waiting = False
    await passing
    item = await item_of(exact_store, scope)
    assert issued is not None
    assert item["version"] == 11
    assert item[SECRET_HASH] != first
    assert item["quotas"] == BODY["quotas"]


async def test_failed_condition_of_extra_write_prevents_registration(store: Store, clock: ManualClock) -> None:
    """What stands beside it fails, and so does the rest."""
    scope = await create_scope(store, new_scope())
    before = await item_of(store, scope)
    impossible = ConditionCheck(Key("config", f"TEST#{scope.org}", "nothing"), ItemExists())
    assert await register(store, clock, scope, extra_writes=[impossible]) is None
    assert await item_of(store, scope) == before


async def test_extra_write_is_in_same_transaction(clock: ManualClock) -> None:
    store, scope = MemoryStore(), new_scope()
    record = Put(Key("audit", f"ORG#{scope.org}", "1"), {"action": "register"})
    await create_scope(store, scope)
    assert await register(store, clock, scope, extra_writes=[record])
    assert store.items.pop(record.key) == {"action": "register"}
    assert await register(store, clock, scope, extra_writes=[record]) is None
    assert record.key not in store.items
    await rotate(store, clock, scope, 1, extra_writes=[record])
    assert record.key in store.items


async def test_rotation_deletes_pending_retrieval(store: Store, clock: ManualClock) -> None:
    scope = new_scope()
    first = await register_scope(store, clock, scope)
    row = (await item_of(store, scope))[RETRIEVAL_ROW]
    second = await rotate(store, clock, scope, 24)
    assert await store.get(schema.retrieval_token_key(str(row)), consistent=True) is None
    with pytest.raises(AccessDenied):
        await retrieve(store, clock, scope, first.retrieval_token)
    assert PREVIOUS_SECRET_HASH not in await item_of(store, scope)  # it was never retrieved
    assert await is_good(store, clock, scope, await retrieve(store, clock, scope, second.retrieval_token))


async def test_secret_retrieved_during_rotation_has_its_grace(clock: ManualClock) -> None:
    memory, scope = MemoryStore(), new_scope()
    store = InterceptingStore(memory)
    issued = await register_scope(memory, clock, scope)
    fetched: list[str] = []

    async def fetch() -> None:
        fetched.append(await retrieve(memory, clock, scope, issued.retrieval_token))

    store.before["transact"] = fetch
    second = await rotate(store, clock, scope, 24)  # type: ignore[arg-type]
    new = await retrieve(memory, clock, scope, second.retrieval_token)
    assert [await is_good(memory, clock, scope, each) for each in (*fetched, new)] == [True, True]


# Lost answers and a store in trouble.


async def test_lost_answer_is_resolved_by_read(clock: ManualClock) -> None:
    memory, scope = MemoryStore(), new_scope()
    store: Any = InterceptingStore(memory)
    await create_scope(memory, scope)
    store.after["transact"] = raise_answer_lost
    first = await register(store, clock, scope)
    assert first is not None
    old = await retrieve(memory, clock, scope, first.retrieval_token)
    store.after["transact"] = raise_answer_lost
    second = await rotate(store, clock, scope, 1)
    new = await retrieve(memory, clock, scope, second.retrieval_token)
    assert [await is_good(memory, clock, scope, each) for each in (old, new)] == [True, True]


@pytest.mark.parametrize("trouble", [raise_answer_lost, raise_unavailable])
async def test_registration_not_applied_can_be_repeated(clock: ManualClock, trouble: Any) -> None:
    memory, scope = MemoryStore(), new_scope()
    store: Any = InterceptingStore(memory)
    await create_scope(memory, scope)
    store.before["transact"] = trouble
    with pytest.raises(StoreUnavailable):
        await register(store, clock, scope)
    assert SECRET_HASH not in await item_of(memory, scope)
    assert await register(store, clock, scope) is not None
    store.before["transact"] = trouble
    with pytest.raises(StoreUnavailable):
        await rotate(store, clock, scope, 1)
    assert await rotate(store, clock, scope, 1)


def _refusing(*codes: ReasonCode) -> Any:
    async def refuse() -> None:
        raise TransactionFailed([CancellationReason(code) for code in codes])

    return refuse


async def test_registration_with_conflicts_is_retried(clock: ManualClock) -> None:
    memory, scope = MemoryStore(), new_scope()
    store: Any = InterceptingStore(memory)
    await create_scope(memory, scope)
    store.before["transact"] = _refusing(ReasonCode.CONFLICT, ReasonCode.NONE)
    registering = asyncio.create_task(register(store, clock, scope))
    while not clock.remaining_sleeps():
        assert not registering.done()
        await asyncio.sleep(0.001)
    await clock.advance(1)
    assert await registering is not None
    store.before["transact"] = _refusing(ReasonCode.THROTTLED, ReasonCode.NONE)
    with pytest.raises((TransactionFailed, StoreThrottled)):
        await rotate(store, clock, scope, 0)


async def test_registration_losing_race_returns_none(clock: ManualClock) -> None:
    memory, scope = MemoryStore(), new_scope()
    store: Any = InterceptingStore(memory)
    await create_scope(memory, scope)
    theirs: list[IssuedSecret | None] = []

    async def be_faster() -> None:
        theirs.append(await register(memory, clock, scope))

    store.before["transact"] = be_faster
    assert await register(store, clock, scope) is None
    assert theirs[0] is not None

    async def rotate_faster() -> None:
        theirs.append(await rotate(memory, clock, scope, 0))

    store.before["transact"] = rotate_faster
    with pytest.raises(WriteConflict, match="another request") as refused:
        await rotate(store, clock, scope, 0)
    assert refused.value.status == 409
    assert theirs[1] is not None
    assert await retrieve(memory, clock, scope, theirs[1].retrieval_token)


# The instance that does it.


@pytest.mark.parametrize("trouble", [None, raise_answer_lost, raise_unavailable])
async def test_client_cache_is_invalidated_whatever_happens(clock: ManualClock, trouble: Any) -> None:
    memory, scope = MemoryStore(), new_scope()
    store: Any = InterceptingStore(memory)
    forgotten: list[Scope] = []
    await create_scope(memory, scope)

    def begin() -> Any:
        return register(store, clock, scope, forgotten.append)

    def turn() -> Any:
        return rotate(store, clock, scope, 0, forgotten.append)

    for change in (begin, turn):
        if trouble is not None:
            store.before["transact"] = trouble
            with pytest.raises(StoreUnavailable):
                await change()
        else:
            await change()
        assert forgotten == [scope]
        forgotten.clear()
        await register(memory, clock, scope)


async def test_hashing_runs_in_threads(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    real = module.hash_secret

    def seen(secret: str) -> bytes:
        threads.append(threading.get_ident())
        return real(secret)

    monkeypatch.setattr(module, "hash_secret", seen)
    store, scope = MemoryStore(), new_scope()
    await register_scope(store, clock, scope)
    await rotate(store, clock, scope, 0)
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_repr_shows_no_secret(clock: ManualClock) -> None:
    store, scope = MemoryStore(), new_scope()
    new = await module._prepare_secret(scope, clock)
    assert new.hashed not in repr(new)
    assert new.issued.retrieval_token not in repr(new)
    issued = await register_scope(store, clock, scope)
    assert issued.retrieval_token not in f"{issued!r} {issued}"
    assert "client_id" in repr(issued)
