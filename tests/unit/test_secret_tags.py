"""Tags within secrets: recognised by every process that has the keys, for one use, and not forgeable."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.auth.client_secrets import (
    _SECRET_FORMAT,
    SECRET_HASH,
    ClientVerifier,
    client_item_key,
    hash_secret,
    make_secret,
)
from price_keeper.auth.registration import _RETRIEVAL_TOKEN_FORMAT, is_tagged_token, register, retrieve, seal_secret
from price_keeper.auth.secret_tags import NO_TAGS, SecretTagger
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.throttles import LookupRate, LookupThrottle
from price_keeper.domain import build_client_id
from price_keeper.stores.contract import Put

from tests.support.client_secrets import create_scope, new_scope, use_cheap_hashes
from tests.support.clock import ManualClock
from tests.support.memory_store import MemoryStore

OLD = SigningKey("old", "HS256", b"o" * 32, b"o" * 32)
NEW = SigningKey("new", "HS256", b"n" * 32, b"n" * 32)


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cheap_hashes(monkeypatch)


def _private(alg: str) -> Any:
    kinds: dict[str, Any] = {
        "HS256": lambda: b"k" * 32,
        "EdDSA": Ed25519PrivateKey.generate,
        "RS256": lambda: generate_private_key(65537, 2048),
    }
    return kinds[alg]()


@pytest.mark.parametrize("alg", ["HS256", "EdDSA", "RS256"])
def test_tag_is_recognised_only_with_its_key(alg: str) -> None:
    key = SigningKey("k", alg, None, _private(alg))
    secret = SecretTagger([key]).make_secret("use")
    assert len(secret) == 32
    assert SecretTagger([key]).is_tagged("use", secret)
    assert not SecretTagger([key]).is_tagged("another use", secret)
    assert not SecretTagger([NEW]).is_tagged("use", secret)
    public_half = replace(key, signs_with=None)
    assert not SecretTagger([public_half]).is_tagged("use", secret)
    assert len(SecretTagger([public_half]).make_secret("use")) == 32


def test_tag_stays_valid_while_its_key_is_configured() -> None:
    secret = SecretTagger([OLD]).make_secret("use")
    assert SecretTagger([NEW, OLD]).is_tagged("use", secret)
    assert not SecretTagger([OLD]).is_tagged("use", SecretTagger([NEW, OLD]).make_secret("use"))
    assert not SecretTagger([NEW]).is_tagged("use", secret)


@given(st.binary(max_size=40), st.integers(0, 255))
def test_invented_secret_has_no_tag(invented: bytes, bit: int) -> None:
    marks = SecretTagger([NEW])
    assert not marks.is_tagged("use", invented)
    secret = bytearray(marks.make_secret("use"))
    secret[bit // 8] ^= 1 << bit % 8
    assert not marks.is_tagged("use", bytes(secret))
    assert not NO_TAGS.is_tagged("use", marks.make_secret("use"))


def test_tagged_secret_has_format_of_older_versions() -> None:
    marks, scope = SecretTagger([NEW]), new_scope()
    client_id = build_client_id(scope.org, scope.app)
    for _ in range(100):
        secret, token = make_secret(client_id, marks), seal_secret(scope, "s", 0, marks).token
        assert _SECRET_FORMAT.fullmatch(secret)
        assert _RETRIEVAL_TOKEN_FORMAT.fullmatch(token)
        assert is_tagged_token(marks, scope, token)
        assert not is_tagged_token(marks, new_scope(), token)
        assert not marks.is_tagged(f"secret of {client_id}", base64.urlsafe_b64decode(f"{token}="))


@pytest.mark.parametrize("marks", [NO_TAGS, SecretTagger([NEW])])
async def test_secrets_of_older_version_are_valid_and_vice_versa(marks: SecretTagger) -> None:
    """Also while some processes are of the older version, which makes and knows no marks."""
    store, clock, scope = MemoryStore(), ManualClock(), new_scope()
    issued = await register(store, clock, await create_scope(store, scope), tagger=marks)  # type: ignore[arg-type]
    assert issued is not None
    secret = await retrieve(store, clock, scope, issued.retrieval_token)  # type: ignore[arg-type]
    for here in (NO_TAGS, SecretTagger([NEW]), SecretTagger([OLD])):
        clients = ClientVerifier(store, clock.now, LookupThrottle(clock), clock.monotonic, here)  # type: ignore[arg-type]
        assert await clients.verify(issued.client_id, secret) == scope


async def test_tagged_invalid_secret_causes_few_reads() -> None:
    """Its former owner waits for no turn, and is answered from memory."""
    store, clock, marks, scope = MemoryStore(), ManualClock(), SecretTagger([NEW]), new_scope()
    none = LookupRate(1, 0.001)
    clients = ClientVerifier(store, clock.now, LookupThrottle(clock, none, none), clock.monotonic, marks)  # type: ignore[arg-type]
    client_id = build_client_id(scope.org, scope.app)
    former = make_secret(client_id, marks)
    reads, get = 0, store.get

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal reads
        reads += 1
        return await get(*arguments, **options)

    store.get = counted  # type: ignore[method-assign]
    for exists in (False, True):
        if exists:
            key_item = hash_secret(make_secret(client_id, marks)).decode()
            await _give(store, scope, key_item)
            await clock.advance(60)
        before = reads
        for _ in range(100):
            with pytest.raises(Exception, match="the client id or its secret is wrong"):
                await clients.verify(client_id, former)
        assert reads == before + 1


async def _give(store: MemoryStore, scope: Any, hashed: str) -> None:

    await store.put(Put(client_item_key(scope), {SECRET_HASH: hashed}))
