"""Secrets that replace each other: which is valid, when, and what wrong ones cost in between."""

from __future__ import annotations

import asyncio
import hmac
from types import SimpleNamespace
from typing import Any

import bcrypt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.auth import client_secrets as module
from price_keeper.auth.client_secrets import (
    GRACE_ENDS_AT,
    PREVIOUS_SECRET_HASH,
    SECRET_HASH,
    ClientVerifier,
    client_item_key,
    hash_secret,
    make_secret,
)
from price_keeper.auth.registration import MAX_GRACE_HOURS, retrieve, rotate
from price_keeper.auth.throttles import LookupRate, LookupThrottle
from price_keeper.domain import Scope, build_client_id
from price_keeper.errors import AccessDenied, Busy, InvalidRequest, TooManyRequests
from price_keeper.stores.contract import Item, Key, Put, Update

from tests.support.client_secrets import InterceptingStore, first_secret, new_scope, register_scope, use_cheap_hashes
from tests.support.clock import ManualClock
from tests.support.effort import tries
from tests.support.memory_store import MemoryStore

HOUR = 3600.0


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cheap_hashes(monkeypatch)


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    seen: list[bytes] = []
    real = bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", lambda secret, kept: seen.append(secret) or real(secret, kept))
    return seen


class Stage:
    """One client, the instance that rotates its secret, and another one."""

    def __init__(self, store: Any = None) -> None:
        self.store: Any = store or MemoryStore()
        self.clock = ManualClock()
        self.scope = new_scope()
        self.here, self.there = (ClientVerifier(self.store, self.clock.now) for _ in range(2))

    async def begin(self) -> str:
        return await first_secret(self.store, self.clock, self.scope)

    async def rotate(self, grace: int) -> str:
        issued = await rotate(self.store, self.clock, self.scope, grace, self.here.invalidate)
        return await retrieve(self.store, self.clock, self.scope, issued.retrieval_token)

    async def is_good(self, secret: str, clients: ClientVerifier | None = None) -> bool:
        try:
            found = await (clients or self.here).verify(build_client_id(self.scope.org, self.scope.app), secret)
        except AccessDenied:
            return False
        assert found == self.scope
        return True

    async def good(self, *given: str, clients: ClientVerifier | None = None) -> list[bool]:
        return [await self.is_good(secret, clients) for secret in given]

    async def write(self, **attributes: Any) -> None:
        await self.store.update(Update(client_item_key(self.scope), set=attributes))


@pytest.mark.parametrize("grace", [1, 24, MAX_GRACE_HOURS])
async def test_old_and_new_secret_are_valid_during_grace(grace: int) -> None:
    stage = Stage()
    old = await stage.begin()
    assert await stage.is_good(old)
    new = await stage.rotate(grace)
    for seconds in (0.0, grace * HOUR - 1):
        await stage.clock.advance(seconds)
        assert await stage.good(old, new) == [True, True]
    await stage.clock.advance(1)  # it is known from a moment ago, and still ends now
    assert await stage.good(old, new) == [False, True]


async def test_rotation_without_grace_ends_old_secret_here_at_once_and_elsewhere_within_a_minute() -> None:
    stage = Stage()
    old = await stage.begin()
    assert await stage.good(old, clients=stage.here) == await stage.good(old, clients=stage.there) == [True]
    new = await stage.rotate(0)
    assert await stage.good(old, new, clients=stage.here) == [False, True]
    await stage.clock.advance(module.HASH_CACHE_SECONDS)
    assert await stage.good(old, new, clients=stage.there) == [False, True]
    assert PREVIOUS_SECRET_HASH not in stage.store.items[client_item_key(stage.scope)]


async def test_only_newest_and_previous_secret_are_kept() -> None:
    stage = Stage()
    first = await stage.begin()
    second, third = await stage.rotate(100), await stage.rotate(1)
    assert await stage.good(first, second, third) == [False, True, True]
    fourth = await stage.rotate(0)
    assert await stage.good(second, third, fourth) == [False, False, True]


async def test_secret_never_retrieved_does_not_replace_one_in_use() -> None:
    stage = Stage()
    in_use = await stage.begin()
    lost = await rotate(stage.store, stage.clock, stage.scope, 24)
    await stage.clock.advance(12 * HOUR)
    with pytest.raises(AccessDenied):  # too late, which is no fetching
        await retrieve(stage.store, stage.clock, stage.scope, lost.retrieval_token)
    new = await stage.rotate(24)
    await stage.clock.advance(24 * HOUR - 1)
    assert await stage.good(in_use, new) == [True, True]
    await stage.clock.advance(1)
    assert await stage.good(in_use, new) == [False, True]


async def test_ended_secret_is_not_restored_by_rotation() -> None:
    stage = Stage()
    ended = await stage.begin()
    await rotate(stage.store, stage.clock, stage.scope, 1)
    await stage.clock.advance(HOUR)
    new = await stage.rotate(24)
    assert await stage.good(ended, new) == [False, True]


@pytest.mark.parametrize("grace", [-1, MAX_GRACE_HOURS + 1, True, 1.5, "24", None])
async def test_grace_is_whole_hours_up_to_a_week(grace: Any) -> None:
    stage = Stage()
    old = await stage.begin()
    with pytest.raises(InvalidRequest, match="from 0 to 168"):
        await rotate(stage.store, stage.clock, stage.scope, grace)
    assert await stage.is_good(old)


async def test_read_from_before_rotation_does_not_outlive_it() -> None:
    """It has the old hash in hand when the rotation is done."""
    stage = Stage()
    old = await stage.begin()
    slow = InterceptingStore(stage.store)
    clients = ClientVerifier(slow, stage.clock.now)  # type: ignore[arg-type]

    async def rotated() -> None:
        await rotate(stage.store, stage.clock, stage.scope, 0, clients.invalidate)

    slow.after["get"] = rotated
    assert await stage.good(old, old, clients=clients) == [False, False]
    assert clients._queues == {}


async def test_rotating_instance_reads_its_own_write() -> None:
    """Reads that are not consistent may tell, for a while, what stood there before."""

    class Late(MemoryStore):
        async def get(self, key: Key, *, consistent: bool = False) -> Item | None:
            return self.items.get(key) if consistent else before

    stage = Stage(Late())
    old = await stage.begin()
    before = stage.store.items[client_item_key(stage.scope)]
    new = await stage.rotate(0)
    assert await stage.good(old, new) == [False, True]


async def test_comparison_from_before_rotation_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    old = await stage.begin()
    loop = asyncio.get_running_loop()
    real = bcrypt.checkpw

    def slow(secret: bytes, kept: bytes) -> bool:
        rotated = rotate(stage.store, stage.clock, stage.scope, 0, stage.here.invalidate)
        asyncio.run_coroutine_threadsafe(rotated, loop).result()
        return real(secret, kept)

    monkeypatch.setattr(bcrypt, "checkpw", slow)
    assert await stage.is_good(old)  # it was when it was asked
    monkeypatch.setattr(bcrypt, "checkpw", real)
    assert not await stage.is_good(old)
    assert stage.here._verified_digests == {}


async def test_generation_of_rotated_secret_is_not_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    old = await stage.begin()
    loop = asyncio.get_running_loop()
    real = bcrypt.checkpw

    def slow(secret: bytes, kept: bytes) -> bool:
        monkeypatch.setattr(bcrypt, "checkpw", real)
        rotated = rotate(stage.store, stage.clock, stage.scope, 0, stage.here.invalidate)
        asyncio.run_coroutine_threadsafe(rotated, loop).result()
        return real(secret, kept)

    monkeypatch.setattr(bcrypt, "checkpw", slow)
    with pytest.raises(AccessDenied):
        await stage.here.verify_with_generation(build_client_id(stage.scope.org, stage.scope.app), old)


async def test_rotation_keeps_client_known_to_throttle() -> None:
    """Strangers wait for their turn, and here is none: another of that address has taken them all."""
    stage = Stage()
    one = LookupRate(1, 0.001)
    stage.here = ClientVerifier(stage.store, stage.clock.now, LookupThrottle(stage.clock, one, one))
    old = await stage.begin()
    assert await stage.is_good(old)
    with pytest.raises(Busy):
        await stage.here.verify(build_client_id(new_scope().org, "web"), make_secret())
    new = await stage.rotate(1)
    assert await stage.good(old, new) == [True, True]


async def test_login_before_registration_does_not_block_login_after_it() -> None:
    stage = Stage()
    assert not await stage.is_good(make_secret())
    issued = await register_scope(stage.store, stage.clock, stage.scope)
    stage.here.invalidate(stage.scope)
    assert await stage.is_good(await retrieve(stage.store, stage.clock, stage.scope, issued.retrieval_token))


async def test_clock_set_back_does_not_prolong_old_secret() -> None:
    stage = Stage()
    old = await stage.begin()
    await stage.good(old, clients=stage.there)
    await stage.rotate(0)
    stage.clock.set_wall(stage.clock.now() - 10 * HOUR)
    assert await stage.good(old, clients=stage.there) == [False]


# What wrong ones cost.


async def flood(stage: Stage, count: int) -> set[str]:
    client = build_client_id(stage.scope.org, stage.scope.app)
    sent = [asyncio.create_task(stage.here.verify(client, make_secret())) for _ in range(count)]
    return {type(each).__name__ for each in await asyncio.gather(*sent, return_exceptions=True)}


async def test_two_hashes_do_not_make_wrong_secrets_slower(comparisons: list[bytes]) -> None:
    stage = Stage()
    old, new = await stage.begin(), await stage.rotate(24)
    assert await flood(stage, 500) == {"AccessDenied"}
    assert await stage.good(old, new, old, new) == [True] * 4
    assert await flood(stage, 400) == {"AccessDenied"}
    assert comparisons == [old.encode(), new.encode()]


@pytest.mark.parametrize("which", [SECRET_HASH, PREVIOUS_SECRET_HASH])
async def test_throttled_hash_without_tag_does_not_block_other_secret(which: str) -> None:
    stage = Stage()
    stage.here = ClientVerifier(stage.store, stage.clock.now, monotonic=stage.clock.monotonic)
    old, new = await stage.begin(), await stage.rotate(24)
    await stage.write(**{which: str(stage.store.items[client_item_key(stage.scope)][which]).partition("#")[0]})
    assert await flood(stage, 20) == {"AccessDenied", "TooManyRequests"}
    unchecked, checked = (new, old) if which == SECRET_HASH else (old, new)
    assert await stage.is_good(checked)
    stage.clock.set_wall(stage.clock.now() - 1000 * HOUR)  # which delays no login for weeks
    with pytest.raises(TooManyRequests) as refused:
        await stage.is_good(unchecked)
    assert 0 < (refused.value.retry_after or 0) <= module.FAILED_COMPARISON_SECONDS
    assert await stage.is_good(checked)
    await stage.clock.advance(refused.value.retry_after or 0)
    assert await stage.good(unchecked, checked) == [True, True]


async def test_secrets_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    old, new = await stage.begin(), await stage.rotate(24)
    compared: list[tuple[int, int]] = []

    def seen(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return hmac.compare_digest(left, right)

    monkeypatch.setattr(module, "hmac", SimpleNamespace(digest=hmac.digest, compare_digest=seen))
    another_end = "E=" if old.endswith("A=") else "A="  # which one secret in sixteen has
    for wrong in (make_secret(), old[:-2] + another_end, "A" * 43 + "="):
        await stage.is_good(wrong)
    assert compared == [(8, 8)] * 6  # each with both hashes
    assert await stage.good(old, new) == [True, True]
    compared.clear()
    assert await stage.good(make_secret(), new[:-1], new + "A", "") == [False] * 4
    assert compared == [(32, 32), (32, 32)]  # wrong lengths were refused first


@pytest.mark.parametrize(
    "attributes",
    [
        {SECRET_HASH: "x"},
        {SECRET_HASH: ""},
        {SECRET_HASH: 7},
        {SECRET_HASH: "$2b$12$"},
        {SECRET_HASH: "nul\0"},
        {PREVIOUS_SECRET_HASH: "x", GRACE_ENDS_AT: 10**11},
        {PREVIOUS_SECRET_HASH: ["x"], GRACE_ENDS_AT: 10**11},
    ],
)
async def test_malformed_hash_accepts_nobody(attributes: dict[str, Any]) -> None:
    stage = Stage()
    secret = await stage.begin()
    await stage.write(**attributes)
    assert await stage.good(make_secret(), secret) == [False, SECRET_HASH not in attributes]


@pytest.mark.parametrize("ends", [None, "99999999999", True, 0])
async def test_previous_hash_without_end_is_invalid(ends: Any) -> None:
    stage = Stage()
    await stage.begin()
    forever = make_secret()
    more = {} if ends is None else {GRACE_ENDS_AT: ends}
    item = {
        **stage.store.items[client_item_key(stage.scope)],
        PREVIOUS_SECRET_HASH: hash_secret(forever).decode(),
        **more,
    }
    await stage.store.put(Put(client_item_key(stage.scope), item))
    assert not await stage.is_good(forever)


# Against a plain model: a list of who is good until when.

STEPS = st.one_of(
    st.tuples(st.just("rotate"), st.sampled_from([0, 1, 2, 168])),
    st.tuples(st.just("lose"), st.sampled_from([0, 1, 2, 168])),  # a rotation whose secret is never retrieved
    st.tuples(st.just("wait"), st.sampled_from([1.0, 30.0, 60.0, HOUR - 1, HOUR, 2 * HOUR, 168 * HOUR])),
    st.tuples(st.just("look"), st.just(0)),
)


class Model:
    """`spans`: for each retrieved secret, from when to when it is valid."""

    def __init__(self, now: float, secret: str) -> None:
        self.spans: dict[str, tuple[float, float]] = {secret: (now, float("inf"))}
        self.newest: str | None = secret  # None if it was not retrieved
        self.previous: str | None = None

    def rotated(self, now: float, grace: int, secret: str | None) -> None:
        stays = self.newest if self.newest is not None else self.previous
        for each, (begin, end) in self.spans.items():
            until = now + grace * HOUR if each == stays and end > now else now
            self.spans[each] = (begin, min(end, until) if each != stays or end <= now else until)
        self.previous = stays if stays is not None and self.spans[stays][1] > now else None
        self.newest = secret
        if secret is not None:
            self.spans[secret] = (now, float("inf"))


@settings(max_examples=tries(60))
@given(st.lists(STEPS, max_size=12))
def test_random_rotations_match_model(steps: list[tuple[str, Any]]) -> None:
    asyncio.run(played(steps))


async def played(steps: list[tuple[str, Any]]) -> None:
    stage = Stage()
    model = Model(stage.clock.now(), await stage.begin())
    for what, how in [*steps, ("look", 0)]:
        if what == "wait":
            await stage.clock.advance(how)
        elif what == "rotate":
            model.rotated(stage.clock.now(), how, await stage.rotate(how))
        elif what == "lose":
            await rotate(stage.store, stage.clock, stage.scope, how, stage.here.invalidate)
            model.rotated(stage.clock.now(), how, None)
        else:
            await looked(stage, model)


async def looked(stage: Stage, model: Model) -> None:
    now = stage.clock.now()
    for secret, (begin, end) in model.spans.items():
        assert await stage.is_good(secret) is (begin <= now < end)
        elsewhere = await stage.is_good(secret, stage.there)
        if begin + module.HASH_CACHE_SECONDS <= now < end:
            assert elsewhere
        if now >= end + module.HASH_CACHE_SECONDS:
            assert not elsewhere
    assert not await stage.is_good(make_secret())


async def test_org_secret_rotates_like_app_secret() -> None:
    stage = Stage()
    stage.scope = Scope(stage.scope.org)
    old, new = await stage.begin(), await stage.rotate(1)
    assert await stage.good(old, new) == [True, True]
    assert client_item_key(stage.scope).sk == "CONFIG"
