"""Who pays for a call that starts now: the counters of its scopes, in the periods of its org's zone."""

from __future__ import annotations

from typing import NamedTuple

from proxy.calendar_days import Period, span
from proxy.clock import Clock
from proxy.model import Caller, Scope
from proxy.recording.entries import Account, Counter
from proxy.selection.orgs import Org, Orgs

MOST_ACCOUNTS = 20_000  # an app and a label each; beyond it all are made anew

_Key = tuple[str, "str | None", str]


class _Kept(NamedTuple):
    account: Account
    org: Org
    start: int
    end: int


class Accounts:
    def __init__(self, orgs: Orgs, clock: Clock) -> None:
        self._orgs = orgs
        self._clock = clock
        self._kept: dict[_Key, _Kept] = {}

    def known(self, caller: Caller, label: str) -> Account | None:
        """Without asking anybody; None if somebody has to be asked first."""
        org = self._orgs.known(caller.org)
        if org is None:
            return None
        kept = self._kept.get((caller.org, caller.app, label))
        if kept is not None and kept.org is org and kept.start <= self._clock.now() < kept.end:
            return kept.account
        return self._made(caller, label, org)

    async def learned(self, caller: Caller, label: str) -> Account:
        return self._made(caller, label, await self._orgs.learned(caller.org))

    def _made(self, caller: Caller, label: str, org: Org) -> Account:
        day = span(Period.DAY, self._clock.now(), org.zone)
        account = Account.of(Counter(scope.key, label, day.key, org.shards) for scope in _scopes(caller, org))
        if len(self._kept) >= MOST_ACCOUNTS:
            self._kept.clear()
        self._kept[caller.org, caller.app, label] = _Kept(account, org, day.start, day.end)
        return account


def _scopes(caller: Caller, org: Org) -> list[Scope]:
    """An org's total is the sum over its apps, unless its quotas are its own."""
    whole = Scope(caller.org)
    if caller.app is None:
        return [whole]
    app = Scope(caller.org, caller.app)
    return [app] if org.quota_scope == "APP" else [whole, app]
