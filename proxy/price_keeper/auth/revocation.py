"""Which tokens are valid no more, though their signature is good: told by the store, by the token or by its session,
or by its client, all of whose tokens so far may be ended at once.

"Not revoked" is remembered for a minute at most, so that is how late a revocation made elsewhere is seen; one made here
holds at once. A token in steady use is asked about in the background, and its calls wait for nobody. While the store is
away, what it said before holds for that minute; then, if the configuration wants that, signature and expiry alone count
for a bounded time, and after it nobody gets in.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Literal

from price_keeper import telemetry as metrics
from price_keeper.auth.clients import credentials_key, generation_of
from price_keeper.auth.tokens import Claims
from price_keeper.clock import Clock
from price_keeper.errors import AccessDenied, Busy, ConditionFailed, TokenRejected, StoreError, StoreUnavailable
from price_keeper.model import Scope
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Item, ItemMissing, Key, Put, Store, any_of, below, ignore_expired
from price_keeper.tasks import Tasks
from price_keeper.telemetry import MetricsRegistry

HOLDS_SECONDS: Final = 60.0  # from the moment of asking
DUE_SECONDS: Final = 30.0  # from then on whoever calls has it asked again; leaves a slow store half a minute
WAIT_SECONDS = 2.0  # for the store, of a call whose token is not known
ASK_AGAIN_SECONDS: Final = 3.0  # while the store is away, for all tokens together
PROBE_SECONDS = (
    5.0  # how often it is looked whether the store is back, so that nobody is let in by the grace for longer
)
REMEMBERED = 20_000  # tokens that were asked about
MARKED = 50_000  # tokens and sessions known to be revoked
GRACE_SECONDS: Final = 600

_REVOKED: Final = "the token was revoked: ask for a new one"

_log = logging.getLogger("price_keeper.auth")

_Names = tuple[str, ...]  # under which a token may be revoked: keys of the table
_NOBODY: Final = ("PROBE",)


@dataclass(slots=True)
class _Answer:
    """Not revoked. Times are by the monotonic clock."""

    due: float
    old: float
    is_grace: bool = False


@dataclass(slots=True)
class _Question:
    """One for all who want to know."""

    done: asyncio.Event
    is_answered: bool = False


class Revocation:
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
        self._tasks = tasks
        self._grace = grace_seconds if on_store_down == "serve" else 0.0
        self._answers: dict[_Names, _Answer] = {}
        self._asking: dict[_Names, _Question] = {}
        # Until when that stands in the store; 0 where it is not known to. An expired one does no harm: its tokens have
        # expired as well.
        self._marks: dict[str, int] = {}
        self._away_since: float | None = None
        self._asked_in_vain = -ASK_AGAIN_SECONDS
        self.let_in_unchecked = self.known_here = self.asked_for = 0
        self.revoked = {"token": 0, "session": 0}
        tasks.run_every("is the list of revoked tokens back", PROBE_SECONDS, self._look_whether_it_is_back)

    def add_to(self, telemetry: MetricsRegistry) -> None:
        telemetry.add(metrics.REVOCATION_AWAY_SECONDS, lambda: self.away_seconds)
        telemetry.add(metrics.TOKENS_UNCHECKED, lambda: self.let_in_unchecked)
        telemetry.add(
            metrics.REVOCATION_LOOKUPS,
            lambda: [({"known": "true"}, self.known_here), ({"known": "false"}, self.asked_for)],
        )
        telemetry.add(metrics.REVOCATIONS, lambda: [({"what": what}, n) for what, n in self.revoked.items()])

    @property
    def away_seconds(self) -> float:
        """For how long the store has not said what is revoked; 0 while it does."""
        return 0.0 if self._away_since is None else self._clock.monotonic() - self._away_since

    @property
    def is_in_grace(self) -> bool:
        return self._away_since is not None and self.away_seconds < self._grace

    async def check(self) -> str | None:
        """For readiness: what is not as it should be. Raises Busy once no token is accepted for that reason."""
        if self._away_since is None:
            return None
        if not self.is_in_grace:
            raise self._cannot_tell()
        return self._cannot_tell().message

    # For the calls.

    def known(self, claims: Claims) -> bool:
        """Whether it is known to be good, without asking anybody. Raises AccessDenied if it is known to be revoked."""
        names = _names(claims)
        self._refuse_marked(names)
        answer, moment = self._answers.get(names), self._clock.monotonic()
        if answer is None or moment >= answer.old:
            return False
        if moment >= answer.due and self._is_worth_asking():
            self._ask(names, claims)
        self.known_here += 1
        return True

    async def learned(self, claims: Claims) -> None:
        """Asks the store. Raises AccessDenied if it is revoked, Busy if that cannot be told."""
        names, is_answered = _names(claims), False
        self.asked_for += 1
        if self._is_worth_asking():
            question = self._ask(names, claims)
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_SECONDS):
                    await question.done.wait()
            is_answered = question.is_answered
            if not is_answered:
                self._is_away()
        self._refuse_marked(names)
        if not is_answered:
            self._let_in_unchecked(names)

    async def is_revoked(self, claims: Claims) -> bool:
        """For who hands a token out once more: as far as it can be told, for one read of the store a minute."""
        try:
            if not self.known(claims):
                await self.learned(claims)
        except AccessDenied:
            return True
        except Busy:  # whether it gets calls through is for those to say
            return False
        return False

    def _refuse_marked(self, names: _Names) -> None:
        for name in names:
            if name in self._marks:
                raise TokenRejected(_REVOKED)

    def _let_in_unchecked(self, names: _Names) -> None:
        """Raises Busy where that is not wanted, or has been going on for too long."""
        assert self._away_since is not None
        if not self.is_in_grace:
            raise self._cannot_tell()
        self.let_in_unchecked += 1
        due = self._clock.monotonic() + ASK_AGAIN_SECONDS
        _remember(self._answers, names, _Answer(due, self._away_since + self._grace, is_grace=True))

    def _cannot_tell(self) -> Busy:
        away = f"the store has not said for {self.away_seconds:.0f} s which tokens are revoked"
        if self.is_in_grace:
            return Busy(f"{away}; signatures alone count for up to {self._grace:.0f} s")
        return Busy(f"{away}, so none is accepted; try again", retry_after=5)

    # Asking.

    def _is_worth_asking(self) -> bool:
        """While the store is away, of all calls one in a few seconds asks."""
        moment = self._clock.monotonic()
        if self._away_since is None:
            return True
        if moment < self._asked_in_vain + ASK_AGAIN_SECONDS:
            return False
        self._asked_in_vain = moment
        return True

    def _ask(self, names: _Names, claims: Claims) -> _Question:
        """Whoever asks about the same token meanwhile waits for the same answer."""
        question = self._asking.get(names)
        if question is None:
            question = self._asking[names] = _Question(asyncio.Event())
            self._tasks.spawn(self._asked(names, claims, question))
        return question

    async def _asked(self, names: _Names, claims: Claims, question: _Question) -> None:
        # What is forgotten while the answer is on its way stays forgotten: it may be older than what was marked.
        answers, asking, moment = self._answers, self._asking, self._clock.monotonic()
        try:
            for name, until in (await self._revoked_of(names, claims)).items():
                self.mark(name, until)
            _remember(answers, names, _Answer(moment + DUE_SECONDS, moment + HOLDS_SECONDS))
            question.is_answered = True
            self._is_back()
        except StoreError as failure:
            self._is_away(failure)
        finally:
            del asking[names]
            question.done.set()

    async def _revoked_of(self, names: _Names, claims: Claims | None = None) -> dict[str, int]:
        """Until when. Consistent, so that a minute after a revocation was acknowledged nobody remembers otherwise.

        A row counts as long as its token lives, also where our clock is past both: it may have jumped, and jump back.
        """
        keys = [Key("revoked-tokens", name) for name in names]
        if claims is not None and claims.generation is not None:
            keys.append(credentials_key(Scope(claims.caller.org, claims.caller.app)))
        found = await self._store.get_many(keys, consistent=True)
        now = self._clock.now() if claims is None else min(self._clock.now(), claims.expires - 1)
        rows = [(name, ignore_expired(item, now)) for name, item in zip(names, found, strict=False)]
        revoked = {name: _until(item) for name, item in rows if item is not None}
        if claims is None or claims.generation is None or claims.generation >= generation_of(found[-1]):
            return revoked
        return revoked | {claims.jti: claims.expires}

    def _is_away(self, failure: StoreError | None = None) -> None:
        self._asked_in_vain = self._clock.monotonic()
        if self._away_since is None:
            self._away_since = self._asked_in_vain
            why = "it does not answer" if failure is None else str(failure)
            _log.warning("the store cannot say which tokens are revoked; grace: %g s: %s", self._grace, why)

    def _is_back(self) -> None:
        if self._away_since is None:
            return
        _log.warning("the store says again which tokens are revoked, after %.0f s", self.away_seconds)
        self._away_since = None
        for names in [names for names, answer in self._answers.items() if answer.is_grace]:
            del self._answers[names]

    async def _look_whether_it_is_back(self) -> None:
        if self._away_since is not None:
            with suppress(StoreError):
                await self._revoked_of(_NOBODY)
                self._is_back()

    # Revoking.

    async def revoke_token(self, claims: Claims) -> None:
        """This one alone. Raises Busy if it cannot be told whether that was written."""
        await self._revoke("token", schema.revoked_token_key(claims.jti), claims.expires, claims.expires)

    async def revoke_session(self, sid: str, until: int, enough: int | None = None) -> None:
        """All access tokens of a session, none of which may be good after `until`. Raises Busy.

        Where it was revoked until `enough` before, nothing is written.
        """
        await self._revoke("session", schema.revoked_session_key(sid), until, until if enough is None else enough)

    async def _revoke(self, what: str, key: Key, until: int, enough: int) -> None:
        """What is known to stand there costs the store nothing: anybody may give back a dead token all day."""
        if self._marks.get(key.pk, 0) >= enough:
            return
        try:
            await self._store.put(Put(key, {EXPIRY_ATTRIBUTE: until}, any_of(ItemMissing(), below(EXPIRY_ATTRIBUTE, enough))))
        except ConditionFailed:  # it was revoked before, and for as long
            until = enough
        except StoreError as failure:
            if isinstance(failure, StoreUnavailable) and failure.maybe_applied:
                self.mark(key.pk)
            raise Busy("nothing can be revoked while the store is away; try again", retry_after=5) from None
        else:
            self.revoked[what] += 1
        self.mark(key.pk, until)

    def ask_anew(self) -> None:
        """About every token, since all of a client's were ended: elsewhere that is seen within a minute."""
        self._answers, self._asking = {}, {}

    def mark(self, name: str, until: int = 0) -> None:
        """Says here what stands in the store by now: `name` is a key of its table."""
        if len(self._marks) >= MARKED:
            for oldest in list(self._marks)[: MARKED // 2]:
                del self._marks[oldest]
            self._answers = {}  # one of them may be of a token whose mark is gone: so all ask anew
        self._marks[name] = max(until, self._marks.get(name, 0))


def _until(item: Item) -> int:
    found = item.get(EXPIRY_ATTRIBUTE)
    return int(found) if isinstance(found, int | Decimal) else 0


def _names(claims: Claims) -> _Names:
    return (claims.jti,) if claims.sid is None else (claims.jti, f"SID#{claims.sid}")


def _remember(answers: dict[_Names, _Answer], names: _Names, answer: _Answer) -> None:
    if len(answers) >= REMEMBERED and names not in answers:
        for oldest in list(answers)[: REMEMBERED // 2]:
            del answers[oldest]
    answers[names] = answer
