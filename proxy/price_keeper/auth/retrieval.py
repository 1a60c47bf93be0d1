"""A client's secret, kept to be fetched once with a token that only the one who made it was told.

    token --HKDF, label 1--> where the row stands
          --HKDF, label 2--> the key of the secret in it

So neither the store nor anybody who reads it has the secret, and a token tells nothing of another one. The first use
takes the row away in one write that returns it: of many, one gets the secret. An answer of the store that gets lost may
have been that one. Then the secret is gone, and a rotation makes a new one: it is lost, and never handed out twice.

First the row is looked for, so that an invented token writes nothing. Then the client's item is marked, so that a
rotation knows whether anybody can have the secret. A crash between the mark and the use leaves a secret that counts as
fetched and still can be; never one that counts as unknown and is in use.
"""

from __future__ import annotations

import base64
import re
import secrets
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from price_keeper.auth.client_secrets import SECRET_CREATED_AT, client_item_key
from price_keeper.auth.secret_tags import NO_TAGS, SecretTagger
from price_keeper.clock import Clock
from price_keeper.errors import AccessDenied, Busy, ConditionFailed, StoreError, StoreUnavailable
from price_keeper.model import Scope, build_client_id
from price_keeper.stores import schema
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    Delete,
    Item,
    Key,
    Put,
    Store,
    Update,
    above,
    all_of,
    equals,
    ignore_expired,
)

# On the client's item.
RETRIEVAL_ROW = "client_secret_retrieval_row"  # of the newest secret
RETRIEVED_AT = "client_secret_retrieved_at_epoch"  # missing as long as nobody has fetched that one

RETRIEVAL_SECONDS = 600
_RETRIEVAL_TOKEN_FORMAT = re.compile(r"[A-Za-z0-9_-]{43}")  # 32 bytes in base64 for URLs, in which it never travels
_NONCE_BYTES = 12
_ROW_LABEL = b"price-keeper secret retrieval: row"
_KEY_LABEL = b"price-keeper secret retrieval: key"

_TOKEN_REFUSED = (
    "the retrieval token is not good: it works once, for ten minutes, and for the client it was made for; "
    "if the secret was not received, rotate the credentials to get a new one"
)
_ANSWER_LOST = (
    "the store's answer was lost, and perhaps the secret with it: try once more, and if the token is refused then, "
    "rotate the credentials to get a new secret"
)
_STORE_AWAY = "the secret cannot be fetched while the store is away; the token is still good"


@dataclass(frozen=True, slots=True)
class SealedSecret:
    """`put` belongs in the transaction that makes the secret the client's."""

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
    item: Item = {"client_id": client_id, "sealed": sealed, EXPIRY_ATTRIBUTE: expires}
    return SealedSecret(token, row, expires, Put(schema.retrieval_token_key(row), item))


def is_tagged_token(tagger: SecretTagger, scope: Scope, token: str) -> bool:
    """Whether this token was made for this client, and not invented."""
    purpose = _token_purpose(build_client_id(scope.org, scope.app))
    return _RETRIEVAL_TOKEN_FORMAT.fullmatch(token) is not None and tagger.is_tagged(
        purpose, base64.urlsafe_b64decode(f"{token}=")
    )


async def retrieve(store: Store, clock: Clock, scope: Scope, token: str) -> str:
    """The secret, to one caller ever. Raises AccessDenied, which does not tell why, and Busy.

    A token shown for another client is refused and stays good for its own.
    """
    if not _RETRIEVAL_TOKEN_FORMAT.fullmatch(token):
        raise AccessDenied(_TOKEN_REFUSED)
    row, client_id, now = _derive(token, _ROW_LABEL).hex(), build_client_id(scope.org, scope.app), int(clock.now())
    await _require_row(store, schema.retrieval_token_key(row), client_id, now)
    await _note_retrieved(store, client_item_key(scope), row, now)
    is_its = all_of(equals("client_id", client_id), above(EXPIRY_ATTRIBUTE, now))
    try:
        item = await store.delete(Delete(schema.retrieval_token_key(row), is_its))
    except ConditionFailed:
        raise AccessDenied(_TOKEN_REFUSED) from None
    except StoreError as failure:
        is_unsure = isinstance(failure, StoreUnavailable) and failure.maybe_applied
        raise Busy(_ANSWER_LOST if is_unsure else _STORE_AWAY, retry_after=5) from None
    return _open_sealed(item or {}, client_id, token)


async def _require_row(store: Store, key: Key, client_id: str, now: int) -> None:
    """An invented token costs a read, and no write."""
    try:
        item = ignore_expired(await store.get(key, consistent=True), now)
    except StoreError:
        raise Busy(_STORE_AWAY, retry_after=5) from None
    if item is None or item.get("client_id") != client_id:
        raise AccessDenied(_TOKEN_REFUSED)


async def _note_retrieved(store: Store, key: Key, row: str, now: int) -> None:
    is_live = all_of(
        equals(RETRIEVAL_ROW, row), above(SECRET_CREATED_AT, now - RETRIEVAL_SECONDS)
    )  # too late, it will not be fetched either
    try:
        await store.update(Update(key, set_if_missing={RETRIEVED_AT: now}, condition=is_live))
    except ConditionFailed:
        pass  # the token is of no newest secret, or of none: it is for the row itself to say so
    except StoreError:
        raise Busy(_STORE_AWAY, retry_after=5) from None


def _open_sealed(item: Item, client_id: str, token: str) -> str:
    sealed = item.get("sealed")
    if not isinstance(sealed, bytes):
        raise AccessDenied(_TOKEN_REFUSED)
    nonce, ciphertext = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
    try:
        return ChaCha20Poly1305(_derive(token, _KEY_LABEL)).decrypt(nonce, ciphertext, client_id.encode()).decode()
    except (InvalidTag, ValueError):  # somebody wrote to the row; ValueError: it is too short for a nonce
        raise AccessDenied(_TOKEN_REFUSED) from None


def _token_purpose(client_id: str) -> str:
    return f"retrieval token of {client_id}"


def _derive(token: str, label: bytes) -> bytes:
    return HKDF(SHA256(), length=32, salt=None, info=label).derive(token.encode())
