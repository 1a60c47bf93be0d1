"""How an org or an app comes to its secret, and to the next one.

The secret itself is nowhere but behind a retrieval token (see `retrieval.py`), which stands in the answer alone: the
hash and what can be fetched are written together, on the item whose settings `selection/settings.py` writes. Neither
touches what the other one owns, so a put and a rotation at once are both done.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from price_keeper.auth import retrieval
from price_keeper.auth.client_secrets import (
    GRACE_ENDS_AT,
    PREVIOUS_SECRET_HASH,
    SECRET_CREATED_AT,
    SECRET_HASH,
    SESSIONS_GENERATION,
    client_item_key,
    hash_secret,
    make_secret,
)
from price_keeper.auth.retrieval import RETRIEVAL_ROW, RETRIEVED_AT
from price_keeper.auth.secret_tags import NO_TAGS, SecretTagger
from price_keeper.clock import Clock
from price_keeper.errors import InvalidRequest, NotFound, ReasonCode, StoreUnavailable, TransactionFailed, WriteConflict
from price_keeper.model import Scope, build_client_id
from price_keeper.stores import schema
from price_keeper.stores.conflict_retry import retry_on_conflict
from price_keeper.stores.contract import (
    AttributeMissing,
    Condition,
    Delete,
    Item,
    ItemExists,
    Key,
    Put,
    Store,
    Update,
    Value,
    Write,
    all_of,
    equals,
)

MAX_GRACE_HOURS = 168

_ROW_FORMAT = re.compile(r"[0-9a-f]{64}")

InvalidateClient = Callable[[Scope], None]


@dataclass(frozen=True, slots=True)
class IssuedSecret:
    """`retrieval_token` fetches the secret, once and until `expires`."""

    client_id: str
    retrieval_token: str = field(repr=False)
    expires: int


@dataclass(frozen=True, slots=True)
class _PreparedSecret:
    issued: IssuedSecret
    hashed: str = field(repr=False)
    attributes: dict[str, Value] = field(repr=False)
    put: Put = field(repr=False)


def build_secret_attributes(scope: Scope, hashed: str, now: float) -> dict[str, Value]:
    """The attributes of a client with one secret."""
    return {
        "client_id": build_client_id(scope.org, scope.app),
        SECRET_HASH: hashed,
        SECRET_CREATED_AT: int(now),
    }


async def register(
    store: Store,
    clock: Clock,
    scope: Scope,
    invalidate: InvalidateClient | None = None,
    extra_writes: Sequence[Write] = (),
    tagger: SecretTagger = NO_TAGS,
) -> IssuedSecret | None:
    """None where there are credentials already, which are never issued again.

    Safe to do again after any failure. Raises NotThere, or what a store may raise. `forget` is `Clients.forget`;
    `beside` is written in the same transaction.
    """
    if SECRET_HASH in await _read_client_item(store, scope):
        return None
    new = await _prepare_secret(scope, clock, tagger)
    update = Update(
        client_item_key(scope),
        set=new.attributes,
        remove=(PREVIOUS_SECRET_HASH, GRACE_ENDS_AT, RETRIEVED_AT),
        condition=all_of(ItemExists(), AttributeMissing(SECRET_HASH)),
    )
    if await _commit(store, clock, scope, [update, new.put, *extra_writes], new.hashed, invalidate):
        return new.issued
    await _read_client_item(store, scope)
    return None


async def rotate(
    store: Store,
    clock: Clock,
    scope: Scope,
    grace_hours: int,
    invalidate: InvalidateClient | None = None,
    extra_writes: Sequence[Write] = (),
    tagger: SecretTagger = NO_TAGS,
) -> IssuedSecret:
    """The secret so far stays good for the grace; one that was in its own grace ends now. Without a grace all sessions
    begun so far are over, and no refresh token of theirs is good any more.

    A secret that was never fetched is nobody's: it ends now, with its retrieval token, and the one before it is the one
    that stays. So who lost a retrieval token in the middle of a rotation can rotate again without harm.

    Raises InvalidRequest, NotThere, Overtaken (409) when somebody else rotated at the same time, or what a store may
    raise. When it is not known whether it was written, rotating once more puts it right.
    """
    validate_grace(grace_hours)
    item = await _read_client_item(store, scope)
    before = item.get(SECRET_HASH)
    if not isinstance(before, str):
        raise NotFound(f"{_describe_scope(scope)} has no credentials to rotate; where there are none, a put makes them")
    new = await _prepare_secret(scope, clock, tagger)
    for _ in range(2):  # the secret so far may be fetched once meanwhile, and not again
        update = _build_rotation(scope, item, new, clock.now(), grace_hours)
        writes = [update, new.put, *_build_row_deletion(item), *extra_writes]
        if await _commit(store, clock, scope, writes, new.hashed, invalidate):
            return new.issued
        item = await _read_client_item(store, scope)
        if item.get(SECRET_HASH) != before:
            break
    raise WriteConflict(
        f"somebody else changed the credentials of {_describe_scope(scope)} at the same time, and those hold"
    )


def validate_grace(hours: object) -> None:
    if type(hours) is not int or not 0 <= hours <= MAX_GRACE_HOURS:
        raise InvalidRequest(f"the grace is a whole number of hours from 0 to {MAX_GRACE_HOURS}")


def _build_rotation(scope: Scope, item: Item, new: _PreparedSecret, now: float, grace_hours: int) -> Update:
    conditions: list[Condition] = [equals(SECRET_HASH, str(item[SECRET_HASH]))]
    previous: Value | None = item[SECRET_HASH]
    if _is_unretrieved(item):
        previous = _read_hash_in_grace(item, now)
        conditions.append(AttributeMissing(RETRIEVED_AT))
    retained: dict[str, Value] = {}
    if grace_hours and previous is not None:
        retained = {PREVIOUS_SECRET_HASH: previous, GRACE_ENDS_AT: int(now) + grace_hours * 3600}
    removed = tuple(name for name in (PREVIOUS_SECRET_HASH, GRACE_ENDS_AT, RETRIEVED_AT) if name not in retained)
    ends_sessions = {} if grace_hours else {SESSIONS_GENERATION: 1}  # without a grace the secret so far has leaked
    return Update(
        client_item_key(scope),
        set={**new.attributes, **retained},
        add=ends_sessions,
        remove=removed,
        condition=all_of(*conditions),
    )


def _is_unretrieved(item: Item) -> bool:
    """Certainly: of a secret that was written by hand nothing is known."""
    return RETRIEVAL_ROW in item and RETRIEVED_AT not in item


def _read_hash_in_grace(item: Item, now: float) -> Value | None:
    ends = item.get(GRACE_ENDS_AT)
    return item.get(PREVIOUS_SECRET_HASH) if isinstance(ends, (int, Decimal)) and now < ends else None


def _build_row_deletion(item: Item) -> list[Delete]:
    """The secret before may be waiting to be fetched: by somebody it was not meant for, or in vain."""
    row = item.get(RETRIEVAL_ROW)
    is_row = isinstance(row, str) and _ROW_FORMAT.fullmatch(row)
    return [Delete(schema.retrieval_token_key(str(row)))] if is_row else []


async def _read_client_item(store: Store, scope: Scope) -> Item:
    item = await store.get(client_item_key(scope), consistent=True)
    if item is None:
        raise NotFound(f"there is no {_describe_scope(scope)}")
    return item


def _describe_scope(scope: Scope) -> str:
    return f"org {scope.org}" if scope.app is None else f"app {scope.app} of org {scope.org}"


async def _prepare_secret(scope: Scope, clock: Clock, tagger: SecretTagger = NO_TAGS) -> _PreparedSecret:
    client_id = build_client_id(scope.org, scope.app)
    secret = make_secret(client_id, tagger)
    hashed = (await asyncio.to_thread(hash_secret, secret)).decode()
    now = clock.now()
    sealed = retrieval.seal_secret(scope, secret, now, tagger)
    attributes = {**build_secret_attributes(scope, hashed, now), RETRIEVAL_ROW: sealed.row}
    issued = IssuedSecret(client_id, sealed.token, sealed.expires)
    return _PreparedSecret(issued, hashed, attributes, sealed.put)


async def _commit(
    store: Store, clock: Clock, scope: Scope, writes: Sequence[Write], hashed: str, invalidate: InvalidateClient | None
) -> bool:
    """False if the item was changed first. What the instance knows of the client is forgotten, written or not."""

    async def attempt() -> bool:
        try:
            await store.transact(writes)
            return True
        except TransactionFailed as failure:
            if all(reason.code is not ReasonCode.CONDITION_FAILED for reason in failure.reasons):
                raise
        except StoreUnavailable as failure:
            if not failure.maybe_applied or not await _is_own_hash(store, client_item_key(scope), hashed):
                raise
        return await _is_own_hash(store, client_item_key(scope), hashed)

    try:
        return await retry_on_conflict(clock, attempt)
    finally:
        if invalidate is not None:
            invalidate(scope)


async def _is_own_hash(store: Store, key: Key, hashed: str) -> bool:
    """After a lost answer: nobody else knows this hash, so if it stands there we wrote it."""
    item = await store.get(key, consistent=True)
    return item is not None and item.get(SECRET_HASH) == hashed
