"""Administrator keys of single orgs: made, rotated, removed and verified.

A key is `pkorg.{org}.{secret}`. The org's item has the hash of the secret, in the form of a client secret's, and for
the grace of a rotation the one before it. Verifying is that of client secrets (`ClientVerifier`): caches, prechecks,
throttled lookups and a bounded number of comparisons are the same.

START HERE: `OrgKeyVerifier`, and `rotate_org_key`, which makes the first key too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from price_keeper.auth.client_secrets import (
    ClientVerifier,
    HashAttributes,
    client_item_key,
    hash_secret,
    make_secret,
)
from price_keeper.auth.registration import validate_grace
from price_keeper.auth.secret_tags import NO_TAGS, SecretTagger
from price_keeper.auth.throttles import LookupThrottle
from price_keeper.clock import Clock
from price_keeper.domain import Scope, build_client_id, is_org_id
from price_keeper.errors import AccessDenied, NotFound
from price_keeper.stores.conflict_retry import retry_on_conflict, transact_with_retry
from price_keeper.stores.contract import (
    AttributeMissing,
    Condition,
    Item,
    ItemExists,
    Store,
    Update,
    Value,
    Write,
    all_of,
    equals,
)

PREFIX = "pkorg."
KEY_ATTRIBUTES = HashAttributes(
    newest="provisioning_api_key_hash",
    previous="provisioning_api_key_previous_hash",
    grace_ends_at="provisioning_api_key_rotation_grace_expires_at_epoch",
    purpose="administrator key of",
)
CREATED_AT = "provisioning_api_key_created_at_epoch"
_ALL_ATTRIBUTES = (KEY_ATTRIBUTES.newest, KEY_ATTRIBUTES.previous, KEY_ATTRIBUTES.grace_ends_at, CREATED_AT)
_WRONG_KEY = "the admin key is wrong"  # the same as of a wrong key of the whole installation


def is_org_key(key: str) -> bool:
    """Whether the key has the form of an org's. That says nothing about whether it is right."""
    return key.startswith(PREFIX)


def name_org_administrator(org: str) -> str:
    """The name by which the audit and the rate limits know whoever has the org's key."""
    return f"org-{org}-key"


def name_client_of_key(key: str) -> str:
    """The client id under which failures with this key are counted."""
    return f"org-{_split(key)[0]}"


class OrgKeyVerifier:
    """Verifies administrator keys of orgs."""

    def __init__(
        self,
        store: Store,
        now: Callable[[], float],
        lookup_throttle: LookupThrottle,
        monotonic: Callable[[], float],
        tagger: SecretTagger = NO_TAGS,
    ) -> None:
        self._secrets = ClientVerifier(store, now, lookup_throttle, monotonic, tagger, KEY_ATTRIBUTES)

    async def verify(self, key: str, address: str) -> str:
        """Return the org whose key this is. Raises AccessDenied, Busy or TooManyRequests."""
        org, secret = _split(key)
        if not is_org_id(org):
            raise AccessDenied(_WRONG_KEY)
        try:
            return (await self._secrets.verify(build_client_id(org, None), secret, address)).org
        except AccessDenied:
            raise AccessDenied(_WRONG_KEY) from None

    def needs_throttled_lookup(self, key: str) -> bool:
        """Whether verifying this would read the store for a key that may be an invention."""
        org, secret = _split(key)
        return is_org_id(org) and self._secrets.needs_throttled_lookup(build_client_id(org, None), secret)

    def invalidate(self, org: str) -> None:
        self._secrets.invalidate(Scope(org))


def _split(key: str) -> tuple[str, str]:
    org, _, secret = key.removeprefix(PREFIX).partition(".")
    return org, secret


async def rotate_org_key(
    store: Store,
    clock: Clock,
    org: str,
    grace_hours: int,
    extra_writes: Sequence[Write],
    tagger: SecretTagger = NO_TAGS,
) -> str:
    """Make a new key, the first one included, and return it; it cannot be read again. The current one stays valid for
    the grace. Raises InvalidRequest, NotFound, WriteConflict or a StoreError."""
    validate_grace(grace_hours)
    secret = make_secret(build_client_id(org, None), tagger, KEY_ATTRIBUTES.purpose)
    hashed = (await asyncio.to_thread(hash_secret, secret)).decode()
    now = int(clock.now())

    def build_update(current: Value | None) -> Update:
        retained: dict[str, Value] = {}
        if grace_hours and current is not None:
            retained = {KEY_ATTRIBUTES.previous: current, KEY_ATTRIBUTES.grace_ends_at: now + grace_hours * 3600}
        written: dict[str, Value] = {KEY_ATTRIBUTES.newest: hashed, CREATED_AT: now, **retained}
        removed = tuple(name for name in _ALL_ATTRIBUTES if name not in written)
        return Update(client_item_key(Scope(org)), set=written, remove=removed, condition=_build_unchanged(current))

    await _change(store, clock, org, build_update, extra_writes)
    return f"{PREFIX}{org}.{secret}"


async def remove_org_key(store: Store, clock: Clock, org: str, extra_writes: Sequence[Write]) -> None:
    """Remove the org's key, with the one before it. Raises NotFound if there is none, or a StoreError."""

    def build_update(current: Value | None) -> Update:
        if current is None:
            raise NotFound(f"org {org} has no administrator key")
        return Update(client_item_key(Scope(org)), remove=_ALL_ATTRIBUTES, condition=_build_unchanged(current))

    await _change(store, clock, org, build_update, extra_writes)


async def _change(
    store: Store,
    clock: Clock,
    org: str,
    build_update: Callable[[Value | None], Update],
    extra_writes: Sequence[Write],
) -> None:
    async def attempt() -> None:
        item: Item | None = await store.get(client_item_key(Scope(org)), consistent=True)
        if item is None:
            raise NotFound(f"there is no org {org}")
        update = build_update(item.get(KEY_ATTRIBUTES.newest))
        await transact_with_retry(store, clock, [update, *extra_writes])

    await retry_on_conflict(clock, attempt)


def _build_unchanged(current: Value | None) -> Condition:
    same = (
        equals(KEY_ATTRIBUTES.newest, current) if isinstance(current, str) else AttributeMissing(KEY_ATTRIBUTES.newest)
    )
    return all_of(ItemExists(), same)
