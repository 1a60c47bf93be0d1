"""Who pays for a call that starts now: the counters of its scopes, in the periods of its org's zone."""

from __future__ import annotations

from typing import NamedTuple

from proxy.calendar_days import Period, Span, span
from proxy.clock import Clock
from proxy.model import Caller, Scope
from proxy.recording.entries import Account, Counter
from proxy.selection.orgs import Org, Orgs

MOST_ACCOUNTS = 20_000  # an app and a label each; beyond it all are made anew

_Key = tuple[str, "str | None", str]


class _Day(NamedTuple):
    """What holds for an org until its day is over, whatever its configuration becomes meanwhile."""

    org: Org
    span: Span


class Accounts:
    def __init__(self, orgs: Orgs, clock: Clock) -> None:
        self._orgs = orgs
        self._clock = clock
        self._days: dict[str, _Day] = {}
        self._kept: dict[_Key, tuple[_Day, Account]] = {}

    def known(self, caller: Caller, label: str) -> Account | None:
        """Without asking anybody; None if somebody has to be asked first."""
        day = self._days.get(caller.org)
        if day is None or not day.span.covers(self._clock.now()):
            org = self._orgs.known(caller.org)
            if org is None:
                return None
            day = self._began(caller.org, org)
        kept = self._kept.get((caller.org, caller.app, label))
        return kept[1] if kept is not None and kept[0] is day else self._made(caller, label, day)

    async def learned(self, caller: Caller, label: str) -> Account:
        org = await self._orgs.learned(caller.org)
        if self._orgs.known(caller.org) is None:  # the defaults hold for this call alone
            return self._made(caller, label, _Day(org, span(Period.DAY, self._clock.now(), org.zone)))
        return self.known(caller, label) or self._made(caller, label, self._began(caller.org, org))

    def _began(self, name: str, org: Org) -> _Day:
        if len(self._days) >= MOST_ACCOUNTS:
            self._days.clear()
        day = self._days[name] = _Day(org, span(Period.DAY, self._clock.now(), org.zone))
        return day

    def _made(self, caller: Caller, label: str, day: _Day) -> Account:
        org = day.org
        account = Account.of(Counter(scope.key, label, day.span.key, org.shards) for scope in _scopes(caller, org))
        if len(self._kept) >= MOST_ACCOUNTS:
            self._kept.clear()
        self._kept[caller.org, caller.app, label] = day, account
        return account


def _scopes(caller: Caller, org: Org) -> list[Scope]:
    """An org's total is the sum over its apps, unless its quotas are its own."""
    whole = Scope(caller.org)
    if caller.app is None:
        return [whole]
    app = Scope(caller.org, caller.app)
    return [app] if org.quota_scope == "APP" else [whole, app]
