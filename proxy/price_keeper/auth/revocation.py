"""Which tokens are revoked though their signature is valid: by token, by session, or all tokens of a client.

START HERE: `RevocationList.is_known_valid` (no I/O) and `check_store`.

"Not revoked" is cached for REVOCATION_CACHE_SECONDS, so a revocation made by another process takes effect within a
minute, and one made here at once. Tokens in steady use are looked up again in the background; their calls do not
wait. While the store is away cached verdicts are used until they expire; after that, if `auth` is configured so,
signature and expiry alone are accepted for a bounded grace, and then every token is refused with 503.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final, Literal

from price_keeper.auth.client_secrets import client_item_key, read_generation
from price_keeper.auth.tokens import REFRESH, Claims, Purpose
from price_keeper.bounded_dict import BoundedDict
from price_keeper.clock import Clock
from price_keeper.domain import Scope
from price_keeper.errors import AccessDenied, Busy, ConditionFailed, StoreError, StoreUnavailable, TokenRejected
from price_keeper.single_flight import SingleFlight
from price_keeper.stores import schema
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    Item,
    ItemMissing,
    Key,
    Put,
    Store,
    any_of,
    below,
    ignore_expired,
)
from price_keeper.tasks import Tasks
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import MetricsRegistry

REVOCATION_CACHE_SECONDS: Final = 60.0  # from the start of the lookup
REFRESH_AFTER_SECONDS: Final = 30.0  # after this a call starts a new lookup, which leaves a slow store half a minute
LOOKUP_TIMEOUT_SECONDS = 2.0  # how long a call with an unknown token waits for the store
STORE_RETRY_SECONDS: Final = 3.0  # between lookups while the store is away, for all tokens together
PROBE_SECONDS = 5.0  # between probes of a store that is away, so that the grace ends soon after its return
MAX_CACHED_VERDICTS = 20_000  # tokens found valid
MAX_REVOKED_NAMES = 50_000  # tokens and sessions known to be revoked
GRACE_SECONDS: Final = 600

_REVOKED: Final = "the token was revoked: ask for a new one"

_log = logging.getLogger("price_keeper.auth")

_RevocationNames = tuple[str, ...]  # partition keys under which a token may be revoked
_PROBE_NAMES: Final = ("PROBE",)


# Attributes of a revocation's row: which client's token was revoked, and when.
TOKEN_TYPE, CLIENT_ID, REVOKED_AT, ORIGINAL_EXPIRY = (
    "token_type",
    "client_id",
    "revoked_at_epoch",
    "original_expiry_epoch",
)
REVOCATION_ATTRIBUTES: Final = (TOKEN_TYPE, CLIENT_ID, REVOKED_AT, ORIGINAL_EXPIRY)


def build_revocation(
    key: Key, token_type: Purpose, client_id: str, original_expiry: int, now: float, until: int | None = None
) -> Put:
    """The row of a revocation. A session's has the type of its refresh token, and stands `until` its access tokens have
    expired too."""
    item: Item = {
        TOKEN_TYPE: token_type,
        CLIENT_ID: client_id,
        REVOKED_AT: int(now),
        ORIGINAL_EXPIRY: original_expiry,
        EXPIRY_ATTRIBUTE: original_expiry if until is None else until,
    }
    return Put(key, item)


@dataclass(slots=True)
class _ValidVerdict:
    """A token that is not revoked. Times are on the monotonic clock."""

    refresh_at: float
    expires_at: float
    is_grace: bool = False


class RevocationList:
    """Knows which tokens are revoked, and revokes tokens and sessions."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        tasks: Tasks,
        on_store_down: Literal["serve", "refuse"] = "serve",
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._store = store
        self._clock = clock
        self._grace = grace_seconds if on_store_down == "serve" else 0.0
        self._verdicts = BoundedDict[_RevocationNames, _ValidVerdict](MAX_CACHED_VERDICTS)
        self._lookups = SingleFlight[_RevocationNames, bool]()
        # Expiry of each known revocation's row; 0 if that is not known. A stale entry does no harm, as its tokens have
        # expired as well.
        self._revoked_until: dict[str, int] = {}
        self._away_since: float | None = None
        self._last_failed_at = -STORE_RETRY_SECONDS
        self.accepted_unchecked = self.cache_hits = self.cache_misses = 0
        self.revoked = {"token": 0, "session": 0}
        tasks.run_every("is the list of revoked tokens back", PROBE_SECONDS, self._probe_store)

    def register_metrics(self, telemetry: MetricsRegistry) -> None:
        telemetry.add(metrics.REVOCATION_AWAY_SECONDS, lambda: self.away_seconds)
        telemetry.add(metrics.TOKENS_UNCHECKED, lambda: self.accepted_unchecked)
        telemetry.add(
            metrics.REVOCATION_LOOKUPS,
            lambda: [({"known": "true"}, self.cache_hits), ({"known": "false"}, self.cache_misses)],
        )
        telemetry.add(metrics.REVOCATIONS, lambda: [({"what": what}, n) for what, n in self.revoked.items()])

    @property
    def away_seconds(self) -> float:
        """How long the store has not answered lookups; 0 while it does."""
        return 0.0 if self._away_since is None else self._clock.monotonic() - self._away_since

    @property
    def is_in_grace(self) -> bool:
        return self._away_since is not None and self.away_seconds < self._grace

    async def check(self) -> str | None:
        """Readiness check: return a warning, or None. Raises Busy once tokens are refused for that reason."""
        if self._away_since is None:
            return None
        if not self.is_in_grace:
            raise self._make_unavailable_error()
        return self._make_unavailable_error().message

    # For calls.

    def is_known_valid(self, claims: Claims) -> bool:
        """Whether the token is cached as valid; no I/O. Raises AccessDenied if it is known to be revoked."""
        names = _names_of(claims)
        if self._revoked_until:
            self._refuse_revoked(names)
        verdict, moment = self._verdicts.get(names), self._clock.monotonic()
        if verdict is None or moment >= verdict.expires_at:
            return False
        if moment >= verdict.refresh_at and self._may_ask_store():
            self._lookups.start(names, lambda: self._look_up(names, claims))
        self.cache_hits += 1
        return True

    async def check_store(self, claims: Claims) -> None:
        """Ask the store. Raises AccessDenied if the token is revoked, Busy if that cannot be known."""
        names, is_answered = _names_of(claims), False
        self.cache_misses += 1
        if self._may_ask_store():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOKUP_TIMEOUT_SECONDS):
                    is_answered = await self._lookups.get_or_load(names, lambda: self._look_up(names, claims))
            if not is_answered:
                self._note_store_away()
        self._refuse_revoked(names)
        if not is_answered:
            self._accept_unchecked(names)

    async def is_revoked(self, claims: Claims) -> bool:
        """Whether a token is known to be revoked, before it is issued again. Costs at most one read a minute."""
        try:
            if not self.is_known_valid(claims):
                await self.check_store(claims)
        except AccessDenied:
            return True
        except Busy:  # unknown; the calls with this token decide then
            return False
        return False

    def _refuse_revoked(self, names: _RevocationNames) -> None:
        for name in names:
            if name in self._revoked_until:
                raise TokenRejected(_REVOKED)

    def _accept_unchecked(self, names: _RevocationNames) -> None:
        """Accept the token for the grace. Raises Busy if no grace is configured or it has passed."""
        assert self._away_since is not None
        if not self.is_in_grace:
            raise self._make_unavailable_error()
        self.accepted_unchecked += 1
        due = self._clock.monotonic() + STORE_RETRY_SECONDS
        self._verdicts[names] = _ValidVerdict(due, self._away_since + self._grace, is_grace=True)

    def _make_unavailable_error(self) -> Busy:
        outage = f"the store has not said for {self.away_seconds:.0f} s which tokens are revoked"
        if self.is_in_grace:
            return Busy(f"{outage}; signatures alone count for up to {self._grace:.0f} s")
        return Busy(f"{outage}, so none is accepted; try again", retry_after=5)

    # Lookups.

    def _may_ask_store(self) -> bool:
        """Whether to ask the store; while it is away, only one call per STORE_RETRY_SECONDS does."""
        moment = self._clock.monotonic()
        if self._away_since is None:
            return True
        if moment < self._last_failed_at + STORE_RETRY_SECONDS:
            return False
        self._last_failed_at = moment
        return True

    async def _look_up(self, names: _RevocationNames, claims: Claims) -> bool:
        """Ask the store, and cache its verdict. Return whether it has answered."""
        # `clear_cache` replaces the dict: a response that is older than that must not enter the new one.
        verdicts, moment = self._verdicts, self._clock.monotonic()
        try:
            for name, until in (await self._read_revoked(names, claims)).items():
                self.note_revoked(name, until)
            verdicts[names] = _ValidVerdict(moment + REFRESH_AFTER_SECONDS, moment + REVOCATION_CACHE_SECONDS)
            self._note_store_back()
        except StoreError as failure:
            self._note_store_away(failure)
            return False
        return True

    async def _read_revoked(self, names: _RevocationNames, claims: Claims | None = None) -> dict[str, int]:
        """Return the expiry of each revocation found. Reads are consistent, so that a minute after a revocation was
        acknowledged no process takes the token for valid.

        A row counts as long as its token lives, even if this clock is past both: it may have jumped ahead, and back.
        """
        keys = [Key("revoked-tokens", name) for name in names]
        if claims is not None and claims.generation is not None:
            keys.append(client_item_key(Scope(claims.caller.org, claims.caller.app)))
        items = await self._store.get_many(keys, consistent=True)
        now = self._clock.now() if claims is None else min(self._clock.now(), claims.expires - 1)
        rows = [(name, ignore_expired(item, now)) for name, item in zip(names, items, strict=False)]
        revoked = {name: _read_expiry(item) for name, item in rows if item is not None}
        if claims is None or claims.generation is None or claims.generation >= read_generation(items[-1]):
            return revoked
        return revoked | {claims.jti: claims.expires}

    def _note_store_away(self, failure: StoreError | None = None) -> None:
        self._last_failed_at = self._clock.monotonic()
        if self._away_since is None:
            self._away_since = self._last_failed_at
            why = "it does not answer" if failure is None else str(failure)
            _log.warning(
                "the store does not answer which tokens are revoked: %s; tokens that are not cached are accepted by "
                "signature alone for %g s, then refused with 503",
                why,
                self._grace,
            )

    def _note_store_back(self) -> None:
        if self._away_since is None:
            return
        _log.info("the store answers again which tokens are revoked, after %.0f s", self.away_seconds)
        self._away_since = None
        for names in [names for names, verdict in self._verdicts.items() if verdict.is_grace]:
            del self._verdicts[names]

    async def _probe_store(self) -> None:
        if self._away_since is not None:
            with suppress(StoreError):
                await self._read_revoked(_PROBE_NAMES)
                self._note_store_back()

    # Revocation.

    async def revoke_token(self, claims: Claims) -> None:
        """Revoke this token alone. Raises Busy if it is not known whether that was written."""
        row = build_revocation(
            schema.revoked_token_key(claims.jti),
            claims.purpose,
            claims.caller.client_id,
            claims.expires,
            self._clock.now(),
        )
        await self._revoke("token", row, claims.expires, claims.expires)

    async def revoke_session(self, client_id: str, sid: str, until: int, sufficient_until: int | None = None) -> None:
        """Revoke all access tokens of a session, none of which may live longer than `until`. Raises Busy.

        Nothing is written if it is already revoked until `sufficient_until`.
        """
        row = build_revocation(schema.revoked_session_key(sid), REFRESH, client_id, until, self._clock.now())
        await self._revoke("session", row, until, until if sufficient_until is None else sufficient_until)

    async def find_revocation(self, client_id: str, name: str) -> Item | None:
        """The row of a client's revoked token or session, by its id; None if there is none. Raises StoreError."""
        keys = [schema.revoked_token_key(name), schema.revoked_session_key(name)]
        for item in await self._store.get_many(keys, consistent=True):
            row = ignore_expired(item, self._clock.now())
            if row is not None and row.get(CLIENT_ID) == client_id:
                return row
        return None

    async def _revoke(self, what: str, row: Put, until: int, sufficient_until: int) -> None:
        """Write a revocation unless it is known to be there: giving a dead token back again costs the store nothing."""
        key = row.key
        if self._revoked_until.get(key.pk, 0) >= sufficient_until:
            return
        try:
            await self._store.put(
                replace(row, condition=any_of(ItemMissing(), below(EXPIRY_ATTRIBUTE, sufficient_until)))
            )
        except ConditionFailed:  # it is already revoked for long enough
            until = sufficient_until
        except StoreError as failure:
            if isinstance(failure, StoreUnavailable) and failure.maybe_applied:
                self.note_revoked(key.pk)
            raise Busy("nothing can be revoked while the store is away; try again", retry_after=5) from None
        else:
            self.revoked[what] += 1
        self.note_revoked(key.pk, until)

    def clear_cache(self) -> None:
        """Forget all verdicts after the generation of a client was incremented; other processes see it in a minute."""
        self._verdicts, self._lookups = BoundedDict(MAX_CACHED_VERDICTS), SingleFlight()

    def note_revoked(self, name: str, until: int = 0) -> None:
        """Record that a revocation is in the store. `name` is the partition key of its row."""
        if len(self._revoked_until) >= MAX_REVOKED_NAMES:
            for oldest in list(self._revoked_until)[: MAX_REVOKED_NAMES // 2]:
                del self._revoked_until[oldest]
            # One may be of a token whose revocation was just evicted, so all are looked up again.
            self._verdicts = BoundedDict(MAX_CACHED_VERDICTS)
        self._revoked_until[name] = max(until, self._revoked_until.get(name, 0))


def _read_expiry(item: Item) -> int:
    expires = item.get(EXPIRY_ATTRIBUTE)
    return int(expires) if isinstance(expires, int | Decimal) else 0


def _names_of(claims: Claims) -> _RevocationNames:
    return (claims.jti,) if claims.sid is None else (claims.jti, f"SID#{claims.sid}")
