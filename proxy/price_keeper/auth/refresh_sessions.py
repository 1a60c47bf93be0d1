"""Refresh sessions of clients: a bounded number per client, of which the newest stay.

A session is a row with the hash of the one refresh token that is valid for it. Each change is one transaction: a
login begins a session and ends those beyond the limit, a refresh replaces the hash on condition that the session
still lives, and ending a session invalidates its refresh token. If there is a limit, each login and each end
increments a version on the head of the client's sessions (optimistic lock): of concurrent logins one commits and
the others retry. Without the store no tokens are issued.

A client's item has a generation. Incrementing it ends all earlier sessions and access tokens in one write.

START HERE: `RefreshSessions`. `SessionWriter` resends a transaction whose response was lost under the same
idempotency token; `RefusalCache` remembers refused tokens so that they cost the store nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias
from uuid import uuid4

from cachetools import TLRUCache

from price_keeper.auth.client_secrets import client_item_key, read_generation
from price_keeper.auth.revocation import RevocationList, build_revocation
from price_keeper.auth.tokens import REFRESH, Claims, MintedToken, TokenService
from price_keeper.clock import Clock
from price_keeper.domain import Scope, build_client_id
from price_keeper.errors import (
    Busy,
    CancellationReason,
    PriceKeeperError,
    ReasonCode,
    SessionLimitRace,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TokenRejected,
    TransactionFailed,
)
from price_keeper.stores import schema
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    AttributeMissing,
    ConditionCheck,
    Delete,
    Item,
    ItemExists,
    ItemMissing,
    Key,
    Prefix,
    Put,
    Query,
    Store,
    Update,
    Value,
    Write,
    above,
    all_of,
    equals,
    ignore_expired,
    iterate_rows,
)
from price_keeper.telemetry.incident import Incident

# Attributes of a session's row and of a refusal.
REFRESH_HASH, BEGAN, REFRESHED, ACCESS_UNTIL, VERSION = (
    "refresh_hash",
    "began_us",
    "refreshed_at",
    "access_until",
    "version",
)
GENERATION = "generation"  # the client's generation when its secret was verified
ROTATED, EVICTED, REVOKED = "rotated", "evicted", "revoked"  # why a refresh token is refused
REFUSED_AT = "at_epoch"  # since when it is refused

MAX_ATTEMPTS = 12  # of one change that keeps losing races; with the backoffs about five seconds
MAX_ENDED_PER_TRANSACTION = 45  # sessions; each needs two writes, and a transaction holds at most a hundred
MAX_EVICTION_ROUNDS = 40  # transactions of one login; more are needed only if the limit was lowered from thousands
MICROS_PER_SECOND = 1_000_000
RETRY_AFTER_SECONDS = 1
REUSE_CACHE_SECONDS = 1.0  # how long the refusal of a reuse within the grace is cached
REUSE_GRACE_SECONDS = 10.0  # a refresh token that is reused this soon is a client's retry, not a theft
# After its end a session may look alive to an instance whose clock is late and which may be refreshing it right now, or
# this process's clock may be wrong by an hour or a zone. So expired rows this young are ended explicitly.
EXPIRY_DOUBT_SECONDS = 86_400.0
FIRST_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 1.0
MAX_WAITING_LOGINS = 1000  # logins of one client in this process; further ones would be answered too late
MAX_RESENDS = 3  # of a transaction whose response was lost, under the same idempotency token
MAX_CACHED_REFUSALS = 10_000  # tokens and sessions
FOREVER = float("inf")

_SESSION_ENDED = "the session is over: log in again"
_TOKEN_REUSED = "the refresh token was used before, so its session is over: log in again"
_TOKEN_JUST_USED = "the refresh token was used a moment ago: use the tokens that it was exchanged for, or log in again"
_REFRESH_UNCERTAIN = "the store's answer was lost, and perhaps the refresh with it: log in again"

_STOLEN_TOKEN = (
    "a refresh token of client %s was used twice, so it may be stolen; session %s is ended. If the client did not "
    "repeat it, rotate its secret without grace: price-keeper rotate"
)

_log = logging.getLogger("price_keeper.auth")


@dataclass(frozen=True, slots=True)
class Session:
    sid: str
    began: float
    refreshed: int
    expires: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session's row, with everything that is needed to end it."""

    client: str
    sid: str
    item: Item

    @property
    def age(self) -> tuple[int, str]:
        return int(self.read_int(BEGAN)), self.sid

    @property
    def generation(self) -> int:
        value = self.item.get(GENERATION, 0)
        return value if isinstance(value, int) else 0

    def read_int(self, name: str) -> int:
        value = self.item[name]
        assert isinstance(value, int)
        return value

    def build_end_writes(self, why: str, now: float) -> list[Write]:
        """Build the writes that end the session, if the row still has this refresh token; a newer one would stay
        valid otherwise."""
        refresh_hash = str(self.item[REFRESH_HASH])
        return [
            Delete(schema.session_key(self.client, self.sid), equals(REFRESH_HASH, refresh_hash)),
            build_refusal(refresh_hash, self.read_int(EXPIRY_ATTRIBUTE), why, now, self.client, self.sid),
        ]


def build_version_bump(client: str, head: Item | None) -> Update:
    version = (head or {}).get(VERSION)
    stands = equals(VERSION, version) if isinstance(version, int) else AttributeMissing(VERSION)
    return Update(schema.session_head_key(client), add={VERSION: 1}, condition=stands)


def build_refusal(token_hash: str, until: int, why: str, now: float, client: str, sid: str) -> Put:
    """Build the row that refuses a refresh token, for as long as the token itself would be valid."""
    item: Item = {EXPIRY_ATTRIBUTE: until, "why": why, REFUSED_AT: int(now), "client_id": client, "sid": sid}
    return Put(schema.refused_refresh_token_key(token_hash), item)


def was_rotated_within(seconds: float, refusal: Item, now: float) -> bool:
    """Whether the token was refused within `seconds` before or after `now`, as the two clocks may differ."""
    refused_at = refusal.get(REFUSED_AT)
    return isinstance(refused_at, int) and abs(now - refused_at) < seconds


@dataclass(frozen=True, slots=True)
class TokenPair:
    """The tokens of a session. The access token can be revoked with the session, by `sid`."""

    access: MintedToken
    refresh: MintedToken
    sid: str


class StaleGeneration(PriceKeeperError):
    """All sessions of the client were ended since its secret was verified, so it must be verified again."""


# Writes that belong into the transaction of a revocation, made from the attributes of its row.
RevocationCompanions: TypeAlias = "Callable[[Item], Sequence[Write]]"


def _no_revocation_companions(_: Item) -> Sequence[Write]:
    return ()


class RefreshSessions:
    """Begins, refreshes, lists and ends the sessions of clients."""

    def __init__(
        self,
        store: Store,
        tokens: TokenService,
        revocation: RevocationList,
        clock: Clock,
        max_sessions: int,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`max_sessions` per client; 0 is unlimited. `chance` returns a number in [0, 1) for the jitter of backoffs."""
        self._store = store
        self._tokens = tokens
        self._revocation = revocation
        self._clock = clock
        self._incident = Incident(_log, clock.monotonic)
        self._max_sessions = max_sessions
        self._writer = SessionWriter(store, clock, chance)
        self._locks = ClientLocks()
        self._refusals = RefusalCache(clock)

    # Operations of clients and administrators.

    async def login(self, scope: Scope, generation: int = 0) -> TokenPair:
        """Begin a session for a client whose secret was verified, and end its oldest ones beyond the limit.

        `generation` is the client's at that verification. Raises StaleGeneration if it has been incremented since,
        SessionLimitRace, AccessDenied if this process cannot mint tokens, or Busy.
        """
        client, sid = build_client_id(scope.org, scope.app), str(uuid4())
        issued = self._mint_pair(scope, sid, generation)
        with translate_store_errors(self._incident):
            if not self._max_sessions:
                _require_generation(generation, await self._store.get(client_item_key(scope), consistent=True))
                await self._write_session([self._build_new_row(client, issued, generation)], client, issued)
                return issued
            async with self._locks.hold(client):
                await self._evict_and_begin(scope, issued, generation)
            return issued

    async def refresh(self, token: str) -> TokenPair:
        """Exchange a refresh token for a new pair and invalidate it. Raises AccessDenied, TokenExpired or Busy."""
        claims = self._tokens.verify_refresh(token)
        caller, sid, token_hash = claims.caller, _sid_of(claims), _hash_token(token)
        self._refusals.raise_if_refused(token_hash)
        issued: TokenPair | None = None
        with translate_store_errors(self._incident):
            for attempt in range(MAX_ATTEMPTS):
                await self._writer.back_off(attempt)
                row = await self._read_refreshable(claims, token_hash)
                issued = issued or self._mint_pair(Scope(caller.org, caller.app), sid, row.generation)
                try:
                    await self._write_session(
                        self._build_rotation(row, token_hash, claims.expires, issued), row.client, issued
                    )
                    return issued
                except TransactionFailed as failure:
                    if is_condition_failure(failure.reasons):
                        # A concurrent request has just refreshed or ended the session.
                        raise TokenRejected(_SESSION_ENDED) from None
                except StoreUnavailable as failure:
                    if failure.maybe_applied:  # a retry with this token could look like a theft
                        raise TokenRejected(_REFRESH_UNCERTAIN) from None
                    raise
        raise Busy("too many requests change this session at once; try again", retry_after=RETRY_AFTER_SECONDS)

    async def revoke(self, scope: Scope, sid: str) -> None:
        """End a session with its refresh token and all access tokens made from it, in one transaction. Raises Busy.

        If the session is over already, its access tokens are revoked. The caller must know that the sid belongs to the
        client: from a token, or from `list_live`.
        """
        client = build_client_id(scope.org, scope.app)
        if self._refusals.has_ended(client, sid):
            return
        if await self.end(scope, sid) is None:
            # A session that is over gets no more tokens, so a row written after its end covers all of them.
            sufficient_until = int(self._clock.now()) + self._tokens.access_seconds
            await self._revocation.revoke_session(client, sid, self._compute_latest_expiry(), sufficient_until)
        self._refusals.remember_ended(client, sid)

    async def end(
        self, scope: Scope, sid: str, companions: RevocationCompanions = _no_revocation_companions
    ) -> bool | None:
        """Like `revoke`, with the companions in the same transaction; None if there is no row of such a session.

        False if only the row was left: the session had expired, or all sessions of its client were ended.
        """
        client = build_client_id(scope.org, scope.app)
        with translate_store_errors(self._incident):
            for attempt in range(MAX_ATTEMPTS):
                await self._writer.back_off(attempt)
                keys = [schema.session_key(client, sid), client_item_key(scope)]
                item, owner = await self._store.get_many(keys, consistent=True)
                if item is None:
                    return None
                row = SessionRow(client, sid, item)
                is_live = ignore_expired(item, self._clock.now()) is not None and row.generation >= read_generation(
                    owner
                )
                if await self._try_end(row, companions):
                    self._revocation.note_revoked(schema.revoked_session_key(sid).pk)
                    return is_live
        raise Busy("too many requests change this session at once; try again", retry_after=RETRY_AFTER_SECONDS)

    async def revoke_tokens(self, scope: Scope, sid: str, companions: RevocationCompanions) -> bool:
        """Revoke the access tokens made from a session that is over. False if there is no such client.

        The caller must know that no other client's session has this sid. Raises Busy.
        """
        key, until = schema.revoked_session_key(sid), self._compute_latest_expiry()
        with translate_store_errors(self._incident):
            (before,) = await self._store.get_many([key], consistent=True)  # no role may use GetItem on this table
            previous_until = (before or {}).get(EXPIRY_ATTRIBUTE)
            until = max(until, previous_until) if isinstance(previous_until, int) else until
            try:
                is_client = ConditionCheck(client_item_key(scope), ItemExists())
                client = build_client_id(scope.org, scope.app)
                revocation = build_revocation(key, REFRESH, client, until, self._clock.now())
                await self._writer.transact([is_client, revocation, *companions(revocation.item)])
            except TransactionFailed as failure:
                if failure.reasons[0].code is ReasonCode.CONDITION_FAILED:
                    return False
                raise
        self._revocation.note_revoked(key.pk)
        return True

    def note_all_ended(self) -> None:
        """Apply an increment of a client's generation in this process at once; others see it within a minute."""
        self._revocation.clear_cache()

    def _compute_latest_expiry(self) -> int:
        """Return when every token made so far has expired."""
        return int(self._clock.now()) + max(self._tokens.access_seconds, self._tokens.refresh_seconds)

    async def revoke_by_token(self, token: str) -> None:
        """Revoke the session of a refresh token, or one access token alone. Raises like `refresh`."""
        claims = self._tokens.verify_any(token)
        if claims.purpose == "access":
            await self._revocation.revoke_token(claims)
        else:
            await self.revoke(Scope(claims.caller.org, claims.caller.app), _sid_of(claims))

    async def list_live(self, scope: Scope) -> list[Session]:
        """Return the client's live sessions, the oldest first. Raises Busy."""
        with translate_store_errors(self._incident):
            owner = await self._store.get(client_item_key(scope), consistent=True)
            rows = await self._read_rows(
                build_client_id(scope.org, scope.app), read_generation(owner), self._clock.now()
            )
        return [
            Session(
                row.sid,
                row.read_int(BEGAN) / MICROS_PER_SECOND,
                row.read_int(REFRESHED),
                row.read_int(EXPIRY_ATTRIBUTE),
            )
            for row in rows
        ]

    # Login.

    def _mint_pair(self, scope: Scope, sid: str, generation: int) -> TokenPair:
        access = self._tokens.mint_access(scope.org, scope.app, sid=sid, generation=generation)
        return TokenPair(access, self._tokens.mint_refresh(scope.org, scope.app, sid), sid)

    async def _evict_and_begin(self, scope: Scope, issued: TokenPair, generation: int) -> None:
        lost = 0
        for _ in range(MAX_EVICTION_ROUNDS):
            try:
                if await self._try_begin(scope, issued, generation):
                    return
            except TransactionFailed as failure:
                if not is_race(failure.reasons) or failure.reasons[-1].code is ReasonCode.CONDITION_FAILED:
                    raise  # the last reason is for the new session's own row, which no other process writes
                lost += 1
                if lost == MAX_ATTEMPTS:
                    _log.warning(
                        "login of client %s lost %d races against other logins of it (%s); it is answered with 503 "
                        "session_limit_race and can be retried",
                        build_client_id(scope.org, scope.app),
                        lost,
                        ", ".join(reason.code.value for reason in failure.reasons),
                    )
                    why = "other logins of this client keep committing first; try again"
                    raise SessionLimitRace(why, failure.reasons, retry_after=RETRY_AFTER_SECONDS) from None
                await self._writer.back_off(lost)
        raise Busy("the client has more sessions than can be ended at once; try again", retry_after=RETRY_AFTER_SECONDS)

    async def _try_begin(self, scope: Scope, issued: TokenPair, generation: int) -> bool:
        """Return False if more sessions must end than fit into one transaction; the first of them are ended then."""
        client, now = build_client_id(scope.org, scope.app), self._clock.now()
        # The head is read before the rows: any change after this read increments its version, and this attempt fails.
        keys = [schema.session_head_key(client), client_item_key(scope)]
        head, owner = await self._store.get_many(keys, consistent=True)
        _require_generation(generation, owner)
        rows = await self._read_rows(client, generation, now - EXPIRY_DOUBT_SECONDS)
        alive = [row for row in rows if ignore_expired(row.item, now) is not None]
        in_doubt = [row for row in rows if ignore_expired(row.item, now) is None]
        surplus = in_doubt + alive[: max(0, len(alive) - (self._max_sessions - 1))]
        writes: list[Write] = [build_version_bump(client, head)]
        for row in surplus[:MAX_ENDED_PER_TRANSACTION]:
            writes += row.build_end_writes(EVICTED, now)
        if len(surplus) > MAX_ENDED_PER_TRANSACTION:
            await self._writer.transact(writes)
            return False
        begun = self._build_new_row(client, issued, generation, alive[-1].age[0] if alive else 0)
        await self._write_session([*writes, begun], client, issued)
        return True

    def _build_new_row(self, client: str, issued: TokenPair, generation: int, after: int = 0) -> Put:
        """Build a row that is the client's newest, whatever this clock says: a late clock must not get it evicted."""
        began = max(int(self._clock.now() * MICROS_PER_SECOND), after + 1)
        item = {BEGAN: began, GENERATION: generation, **self._build_refreshed_attributes(issued)}
        return Put(schema.session_key(client, issued.sid), item, ItemMissing())

    def _build_refreshed_attributes(self, issued: TokenPair) -> dict[str, int | str]:
        return {
            REFRESH_HASH: _hash_token(issued.refresh.token),
            REFRESHED: int(self._clock.now()),
            EXPIRY_ATTRIBUTE: issued.refresh.expires,
            ACCESS_UNTIL: issued.access.expires,
        }

    async def _read_rows(self, client: str, generation: int, since: float) -> list[SessionRow]:
        """Return the rows of sessions not expired at `since` and of this generation or later, the oldest first.

        Expired rows are ignored here, because the store may not have deleted them yet.
        """
        query = Query("sessions", client, Prefix(schema.SESSIONS_PREFIX), consistent=True)
        rows = [
            SessionRow(client, row.key.sk.removeprefix(schema.SESSIONS_PREFIX), row.item)
            async for row in iterate_rows(self._store, query)
            if ignore_expired(row.item, since) is not None
        ]
        return sorted((row for row in rows if row.generation >= generation), key=lambda row: row.age)

    # Refresh.

    async def _read_refreshable(self, claims: Claims, token_hash: str) -> SessionRow:
        client, sid = claims.caller.client_id, _sid_of(claims)
        scope = Scope(claims.caller.org, claims.caller.app)
        keys = [schema.refused_refresh_token_key(token_hash), schema.session_key(client, sid), client_item_key(scope)]
        refusal, item, owner = await self._store.get_many(keys, consistent=True)
        item = ignore_expired(item, self._clock.now())
        if refusal is not None and item is not None and refusal.get("why") == ROTATED:
            if was_rotated_within(REUSE_GRACE_SECONDS, refusal, self._clock.now()):
                raise self._refusals.remember_refusal(token_hash, _TOKEN_JUST_USED, REUSE_CACHE_SECONDS)
            # Two senders have the same token, and it is not known which of them is the client, so neither may continue.
            _log.warning(_STOLEN_TOKEN, client, sid)
            await self.revoke(scope, sid)
            raise self._refusals.remember_refusal(token_hash, _TOKEN_REUSED)
        if refusal is not None or item is None or item.get(REFRESH_HASH) != token_hash:
            raise self._refusals.remember_refusal(token_hash, _SESSION_ENDED)
        row = SessionRow(client, sid, item)
        if row.generation < read_generation(owner):  # all sessions of that generation were ended
            raise self._refusals.remember_refusal(token_hash, _SESSION_ENDED)
        return row

    def _build_rotation(self, row: SessionRow, token_hash: str, until: int, issued: TokenPair) -> list[Write]:
        is_live = all_of(equals(REFRESH_HASH, token_hash), above(EXPIRY_ATTRIBUTE, int(self._clock.now())))
        renewed = self._build_refreshed_attributes(issued)
        # Access tokens minted earlier may have had a longer life than is configured now.
        renewed[ACCESS_UNTIL] = max(row.read_int(ACCESS_UNTIL), issued.access.expires)
        return [
            Update(schema.session_key(row.client, row.sid), set=renewed, condition=is_live),
            build_refusal(token_hash, until, ROTATED, self._clock.now(), row.client, row.sid),
        ]

    # End.

    async def _try_end(self, row: SessionRow, companions: RevocationCompanions) -> bool:
        """Return False if the session was refreshed or ended in the meantime."""
        now, expires = self._clock.now(), row.read_int(EXPIRY_ATTRIBUTE)
        until = max(row.read_int(ACCESS_UNTIL), expires)
        revocation = build_revocation(schema.revoked_session_key(row.sid), REFRESH, row.client, expires, now, until)
        writes = [
            *row.build_end_writes(REVOKED, now),
            revocation,
            Update(schema.session_head_key(row.client), add={VERSION: 1}),
            *companions(revocation.item),
        ]
        try:
            await self._writer.transact(writes)
        except TransactionFailed as failure:
            if not is_race(failure.reasons):
                raise
            return False
        return True

    # Writes.

    async def _write_session(self, writes: Sequence[Write], client: str, issued: TokenPair) -> None:
        """Write a session's row; if all responses are lost, its refresh hash shows whether the write was applied."""
        await self._writer.transact_confirmed(
            writes, schema.session_key(client, issued.sid), {REFRESH_HASH: _hash_token(issued.refresh.token)}
        )


def _require_generation(generation: int, owner: Item | None) -> None:
    """Raise StaleGeneration if the client's generation has been incremented."""
    if read_generation(owner) > generation:
        raise StaleGeneration("all sessions of the client were ended after its secret was verified")


def _hash_token(token: str) -> str:
    return sha256(token.encode()).hexdigest()


def _sid_of(claims: Claims) -> str:
    assert claims.sid is not None, "every refresh token has a sid"
    return claims.sid


class SessionWriter:
    """Writes transactions, and finds out whether one was applied when its response was lost."""

    def __init__(self, store: Store, clock: Clock, chance: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._chance = chance

    async def transact(self, writes: Sequence[Write]) -> None:
        """Write once. After a lost response the same transaction is sent again under the same idempotency token."""
        token, is_unsure = str(uuid4()), False
        for attempt in range(1, MAX_RESENDS + 1):
            try:
                await self._store.transact(writes, token=token)
            except (StoreUnavailable, StoreThrottled) as failure:
                is_unsure = is_unsure or (isinstance(failure, StoreUnavailable) and failure.maybe_applied)
                if not is_unsure:
                    raise
                if attempt == MAX_RESENDS:  # if the last attempt was not applied, the first one still may have been
                    raise StoreUnavailable(str(failure), maybe_applied=True) from None
                await self.back_off(attempt)
            else:
                return

    async def transact_confirmed(self, writes: Sequence[Write], key: Key, expected: Mapping[str, Value]) -> None:
        """Like `transact`. If all responses are lost, read the item: no other process can have written `expected`.

        Raises StoreUnavailable with `maybe_applied` only if that read fails too.
        """
        try:
            await self.transact(writes)
        except StoreUnavailable as failure:
            if not failure.maybe_applied:
                raise
            try:
                item = await self._store.get(key, consistent=True) or {}
            except StoreError:
                raise failure from None
            if any(item.get(name) != value for name, value in expected.items()):
                raise StoreUnavailable(str(failure)) from None

    async def back_off(self, attempt: int) -> None:
        """Sleep with full jitter, so that the losers of a race do not meet again."""
        if attempt:
            longest = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
            await self._clock.sleep(longest * self._chance())


class ClientLocks:
    """Lets one login of a client run at a time in this process, because concurrent ones would only conflict."""

    def __init__(self) -> None:
        self._locks: dict[str, _ClientLock] = {}

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        client_lock = self._locks.setdefault(client, _ClientLock())
        if client_lock.waiters >= MAX_WAITING_LOGINS:
            raise Busy("too many logins of this client are waiting; try again", retry_after=1)
        client_lock.waiters += 1
        try:
            async with client_lock.lock:
                yield
        finally:
            client_lock.waiters -= 1
            if not client_lock.waiters:
                del self._locks[client]


class _ClientLock:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiters = 0


def is_condition_failure(reasons: Sequence[CancellationReason]) -> bool:
    return any(reason.code is ReasonCode.CONDITION_FAILED for reason in reasons)


def is_race(reasons: Sequence[CancellationReason]) -> bool:
    """Whether concurrent changes are the only reason of the failure."""
    codes = {reason.code for reason in reasons} - {ReasonCode.NONE}
    return bool(codes) and codes <= {ReasonCode.CONDITION_FAILED, ReasonCode.CONFLICT}


@contextmanager
def translate_store_errors(incident: Incident) -> Iterator[None]:
    try:
        yield
    except StoreError as failure:
        incident.report(
            "cannot read or change sessions: %s; logins and refreshes fail with 503 until the store answers", failure
        )
        raise Busy("sessions cannot be looked up while the store is away; try again", retry_after=5) from None
    incident.end("sessions can be read and changed again")


class RefusalCache:
    """Refresh tokens that are refused, for good or for a moment, by hash; and sessions that ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries = TLRUCache[Hashable, tuple[float, str]](
            MAX_CACHED_REFUSALS, lambda _key, entry, _now: entry[0], timer=clock.monotonic
        )

    def raise_if_refused(self, token_hash: str) -> None:
        """Raise the TokenRejected that the store's rows would lead to."""
        refused = self._entries.get(token_hash)
        if refused is not None:
            raise TokenRejected(refused[1])

    def remember_refusal(self, token_hash: str, why: str, seconds: float = FOREVER) -> TokenRejected:
        """Remember the refusal, and return the error to raise."""
        self._entries[token_hash] = (self._clock.monotonic() + seconds, why)
        return TokenRejected(why)

    def remember_ended(self, client: str, sid: str) -> None:
        self._entries[client, sid] = (FOREVER, "")

    def has_ended(self, client: str, sid: str) -> bool:
        return (client, sid) in self._entries
