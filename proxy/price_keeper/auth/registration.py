"""Register a client, rotate its secret, and hand each secret out exactly once.

`register` and `rotate` return a retrieval token. The secret itself is stored only encrypted under that token; its
hash and the encrypted row are written in one transaction. The budget settings on the same item are untouched, so a
rotation and a settings change at the same time both succeed.

    token --HKDF, label 1--> the key of the row
          --HKDF, label 2--> the key that encrypts the secret in it

Read access to the store does not suffice to recover a secret, and one token says nothing about another. The first
`retrieve` takes the ciphertext out of the row in the write that returns it, so of several callers one gets the secret.
The row stays until it expires and says that it was used, and when. If the store's response to that write is lost, the
secret is lost too and a rotation makes a new one: a secret is never handed out twice.

`retrieve` first reads the row, so an invented token writes nothing. Then it notes the retrieval on the client's
item, so that a rotation knows whether any caller can have the secret. After a crash between the note and the retrieval
a secret counts as retrieved though it can still be retrieved; the opposite cannot happen.
"""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

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
from price_keeper.auth.secret_tags import NO_TAGS, SecretTagger
from price_keeper.clock import Clock
from price_keeper.domain import Scope, build_client_id
from price_keeper.errors import (
    AccessDenied,
    Busy,
    ConditionFailed,
    InvalidRequest,
    NotFound,
    ReasonCode,
    StoreError,
    StoreUnavailable,
    TransactionFailed,
    WriteConflict,
)
from price_keeper.stores import schema
from price_keeper.stores.conflict_retry import retry_on_conflict
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    AttributeExists,
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
    above,
    all_of,
    equals,
    ignore_expired,
)

MAX_GRACE_HOURS = 168
RETRIEVAL_SECONDS = 600

# Attributes of the client's item.
RETRIEVAL_ROW = "client_secret_retrieval_row"  # of the newest secret
RETRIEVED_AT = "client_secret_retrieved_at_epoch"  # missing until the newest secret is retrieved

# Attributes of the row of a retrieval token.
SEALED = "sealed"  # the encrypted secret; gone once it is used
USED, USED_AT = "used", "used_at_epoch"

RefusalReason: TypeAlias = Literal["expired", "reused", "unknown"]

_ROW_FORMAT = re.compile(r"[0-9a-f]{64}")
_RETRIEVAL_TOKEN_FORMAT = re.compile(r"[A-Za-z0-9_-]{43}")  # 32 bytes in URL-safe base64; it is never put into a URL
_NONCE_BYTES = 12
_ROW_LABEL = b"price-keeper secret retrieval: row"
_KEY_LABEL = b"price-keeper secret retrieval: key"

_TOKEN_REFUSED = (
    "the retrieval token is not valid: it works once, for ten minutes, and for the client it was made for; "
    "if the secret was not received, rotate the credentials to get a new one"
)
_ANSWER_LOST = (
    "the store's answer was lost, and perhaps the secret with it: try once more, and if the token is refused then, "
    "rotate the credentials to get a new secret"
)
_STORE_AWAY = "the secret cannot be fetched while the store is away; the token stays valid"

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
    """Build the attributes of a client with one secret."""
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
    """Make a client's first secret; None if the client has one already, which is never issued again.

    Safe to repeat after any failure. Raises NotFound, or a StoreError. `invalidate` is `ClientVerifier.invalidate`;
    `extra_writes` are part of the same transaction.
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
    """Make a new secret. The current one stays valid for the grace; one that was in its own grace ends now. Without a
    grace all sessions begun so far end, with their refresh tokens.

    A secret that was never retrieved is in no client's hands: it ends now, with its retrieval token, and the secret
    before it is the one that stays valid. So an operator who lost a retrieval token during a rotation can safely rotate
    again.

    Raises InvalidRequest, NotFound, WriteConflict (409) if another rotation ran at the same time, or a StoreError. If
    it is not known whether the write was applied, another rotation corrects the state.
    """
    validate_grace(grace_hours)
    item = await _read_client_item(store, scope)
    before = item.get(SECRET_HASH)
    if not isinstance(before, str):
        raise NotFound(f"{_describe_scope(scope)} has no credentials to rotate; a put of it makes the first ones")
    new = await _prepare_secret(scope, clock, tagger)
    for _ in range(2):  # the current secret may be retrieved in between, which can happen only once
        update = _build_rotation(scope, item, new, clock.now(), grace_hours)
        writes = [update, new.put, *await _build_row_deletion(store, item), *extra_writes]
        if await _commit(store, clock, scope, writes, new.hashed, invalidate):
            return new.issued
        item = await _read_client_item(store, scope)
        if item.get(SECRET_HASH) != before:
            break
    raise WriteConflict(
        f"another request changed the credentials of {_describe_scope(scope)} at the same time; its change is in force"
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
    ends_sessions = {} if grace_hours else {SESSIONS_GENERATION: 1}  # no grace means that the current secret has leaked
    return Update(
        client_item_key(scope),
        set={**new.attributes, **retained},
        add=ends_sessions,
        remove=removed,
        condition=all_of(*conditions),
    )


def _is_unretrieved(item: Item) -> bool:
    """Whether the secret was certainly never retrieved; of a secret that was written by hand this is not known."""
    return RETRIEVAL_ROW in item and RETRIEVED_AT not in item


def _read_hash_in_grace(item: Item, now: float) -> Value | None:
    ends = item.get(GRACE_ENDS_AT)
    return item.get(PREVIOUS_SECRET_HASH) if isinstance(ends, (int, Decimal)) and now < ends else None


async def _build_row_deletion(store: Store, item: Item) -> list[Delete]:
    """Delete the row of the current secret if it still waits for its retrieval, perhaps by an unintended caller. A used
    row has no ciphertext and stays until it expires."""
    row = item.get(RETRIEVAL_ROW)
    if not isinstance(row, str) or not _ROW_FORMAT.fullmatch(row):
        return []
    key = schema.retrieval_token_key(row)
    waiting = await store.get(key, consistent=True)
    return [Delete(key)] if waiting is not None and SEALED in waiting else []


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
    sealed = seal_secret(scope, secret, now, tagger)
    attributes = {**build_secret_attributes(scope, hashed, now), RETRIEVAL_ROW: sealed.row}
    issued = IssuedSecret(client_id, sealed.token, sealed.expires)
    return _PreparedSecret(issued, hashed, attributes, sealed.put)


async def _commit(
    store: Store, clock: Clock, scope: Scope, writes: Sequence[Write], hashed: str, invalidate: InvalidateClient | None
) -> bool:
    """Commit; False if the item was changed first. The cached client is invalidated in any case."""

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
    """Whether this process wrote the item, after a lost response: no other process can know this hash."""
    item = await store.get(key, consistent=True)
    return item is not None and item.get(SECRET_HASH) == hashed


@dataclass(frozen=True, slots=True)
class SealedSecret:
    """`put` must be part of the transaction that gives the secret to the client."""

    token: str = field(repr=False)
    row: str
    expires: int
    put: Put = field(repr=False)


def seal_secret(scope: Scope, secret: str, now: float, tagger: SecretTagger = NO_TAGS) -> SealedSecret:
    client_id = build_client_id(scope.org, scope.app)
    token = base64.urlsafe_b64encode(tagger.make_secret(_token_purpose(client_id))).decode().rstrip("=")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sealed = nonce + ChaCha20Poly1305(_derive(token, _KEY_LABEL)).encrypt(nonce, secret.encode(), client_id.encode())
    row, expires = _derive(token, _ROW_LABEL).hex(), int(now) + RETRIEVAL_SECONDS
    item: Item = {
        "org_id": scope.org,
        **({} if scope.app is None else {"app_id": scope.app}),
        "secret_type": "org" if scope.app is None else "app",
        "client_id": client_id,
        "created_at_epoch": int(now),
        USED: False,
        SEALED: sealed,
        EXPIRY_ATTRIBUTE: expires,
    }
    return SealedSecret(token, row, expires, Put(schema.retrieval_token_key(row), item))


def is_tagged_token(tagger: SecretTagger, scope: Scope, token: str) -> bool:
    """Whether this token was made for this client, as opposed to invented."""
    purpose = _token_purpose(build_client_id(scope.org, scope.app))
    return _RETRIEVAL_TOKEN_FORMAT.fullmatch(token) is not None and tagger.is_tagged(
        purpose, base64.urlsafe_b64decode(f"{token}=")
    )


class RetrievalRefused(AccessDenied):
    """The message does not say why; `reason` is for the metrics."""

    def __init__(self, reason: RefusalReason) -> None:
        self.reason = reason
        super().__init__(_TOKEN_REFUSED)


async def retrieve(store: Store, clock: Clock, scope: Scope, token: str) -> str:
    """Return the secret, once. Raises RetrievalRefused, and Busy.

    A token shown for another client is refused and stays valid for its own.
    """
    if not _RETRIEVAL_TOKEN_FORMAT.fullmatch(token):
        raise RetrievalRefused("unknown")
    row, client_id, now = _derive(token, _ROW_LABEL).hex(), build_client_id(scope.org, scope.app), int(clock.now())
    key = schema.retrieval_token_key(row)
    await _require_row(store, key, client_id, now)
    await _note_retrieved(store, client_item_key(scope), row, now)
    is_its = all_of(equals("client_id", client_id), above(EXPIRY_ATTRIBUTE, now), AttributeExists(SEALED))
    use = Update(key, set={USED: True, USED_AT: now}, remove=(SEALED,), condition=is_its)
    try:
        item = await store.exchange(use)
    except ConditionFailed as failure:
        raise RetrievalRefused(_find_refusal(failure.item, client_id, now) or "unknown") from None
    except StoreError as failure:
        is_unsure = isinstance(failure, StoreUnavailable) and failure.maybe_applied
        raise Busy(_ANSWER_LOST if is_unsure else _STORE_AWAY, retry_after=5) from None
    return _open_sealed(item or {}, client_id, token)


async def _require_row(store: Store, key: Key, client_id: str, now: int) -> None:
    """Check that the row exists, so that an invented token costs one read and no write."""
    try:
        item = await store.get(key, consistent=True)
    except StoreError:
        raise Busy(_STORE_AWAY, retry_after=5) from None
    reason = _find_refusal(item, client_id, now)
    if reason is not None:
        raise RetrievalRefused(reason)


def _find_refusal(item: Item | None, client_id: str, now: int) -> RefusalReason | None:
    """Why a row gives its client no secret; None if it does. The store removes rows some time after they expired."""
    if item is None or item.get("client_id") != client_id:
        return "unknown"
    if item.get(USED) is True:
        return "reused"
    return "expired" if ignore_expired(item, now) is None else None


async def _note_retrieved(store: Store, key: Key, row: str, now: int) -> None:
    # The condition fails for an expired row, which cannot be retrieved any more either.
    is_live = all_of(equals(RETRIEVAL_ROW, row), above(SECRET_CREATED_AT, now - RETRIEVAL_SECONDS))
    try:
        await store.update(Update(key, set_if_missing={RETRIEVED_AT: now}, condition=is_live))
    except ConditionFailed:
        pass  # the token is not of the newest secret, or of none: the deletion of the row decides
    except StoreError:
        raise Busy(_STORE_AWAY, retry_after=5) from None


def _open_sealed(item: Item, client_id: str, token: str) -> str:
    sealed = item.get(SEALED)
    if not isinstance(sealed, bytes):
        raise RetrievalRefused("unknown")
    nonce, ciphertext = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
    try:
        return ChaCha20Poly1305(_derive(token, _KEY_LABEL)).decrypt(nonce, ciphertext, client_id.encode()).decode()
    except (InvalidTag, ValueError):  # the row was changed; ValueError if it is too short for a nonce
        raise RetrievalRefused("unknown") from None


def _token_purpose(client_id: str) -> str:
    return f"retrieval token of {client_id}"


def _derive(token: str, label: bytes) -> bytes:
    return HKDF(SHA256(), length=32, salt=None, info=label).derive(token.encode())
