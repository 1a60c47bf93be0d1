"""What is known of each org: its zone, what its quotas apply to, over how many items its counters are spread.

Read from the store when an org is first seen, and again every now and then, so that a call of a known org asks nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from zoneinfo import ZoneInfo

from proxy.calendar_days import known_zone
from proxy.clock import Clock
from proxy.errors import StoreError
from proxy.stores import schema
from proxy.stores.contract import Item, Store

REFRESH_SECONDS = 60.0
ASK_AGAIN_SECONDS = 3.0  # for an org that is not known yet, while the store is away
MOST_ORGS = 10_000  # beyond it the one known the longest is forgotten

_log = logging.getLogger("proxy.selection")


@dataclass(frozen=True, slots=True)
class Org:
    zone: ZoneInfo
    quota_scope: Literal["ORG", "APP"]
    shards: int


@dataclass(slots=True)
class _Asked:
    """Of an org that is not known yet: one call asks for all that wait."""

    one: asyncio.Lock = field(default_factory=asyncio.Lock)
    again_at: float = 0.0


class Orgs:
    """`default` is what holds for an org of which the store says nothing."""

    def __init__(self, store: Store, default: Org, clock: Clock) -> None:
        self._store = store
        self._default = default
        self._clock = clock
        self._known: dict[str, Org] = {}
        self._asked: dict[str, _Asked] = {}

    def known(self, org: str) -> Org | None:
        return self._known.get(org)

    async def learned(self, org: str) -> Org:
        """Asks the store. While that is away, an org never seen before has the defaults until it is back."""
        if org in self._known:
            return self._known[org]
        asked = self._asked.setdefault(org, _Asked())
        while len(self._asked) > MOST_ORGS:
            del self._asked[next(iter(self._asked))]
        async with asked.one:
            if org not in self._known and self._clock.monotonic() >= asked.again_at:
                await self._ask(org, asked)
        return self._known.get(org, self._default)

    async def _ask(self, org: str, asked: _Asked) -> None:
        try:
            item = await self._store.get(schema.org_config(org))
        except StoreError as failure:
            _log.warning("an org's configuration cannot be read, and the defaults hold: %s", failure)
            asked.again_at = self._clock.monotonic() + ASK_AGAIN_SECONDS
        else:
            self._learn(org, item)
            self._asked.pop(org, None)

    async def refresh(self) -> None:
        """To be called every now and then."""
        names = list(self._known)
        items = await self._store.get_many([schema.org_config(name) for name in names])
        for name, item in zip(names, items, strict=True):
            self._learn(name, item)

    def _learn(self, name: str, item: Item | None) -> None:
        found = self._default if item is None else self._read(name, item)
        if found != self._known.get(name):
            self._known[name] = found
        while len(self._known) > MOST_ORGS:
            del self._known[next(iter(self._known))]

    def _read(self, name: str, item: Mapping[str, Any]) -> Org:
        """What cannot be used is passed over: a call is not refused for a slip in its org's configuration."""
        zone, scope, shards = self._default.zone, self._default.quota_scope, self._default.shards
        try:
            zone = known_zone(str(item.get("timezone", zone.key)))
        except ValueError as failure:
            _log.warning("org %s: %s", name, failure)
        if item.get("quota_scope") in ("ORG", "APP"):
            scope = cast(Literal["ORG", "APP"], item["quota_scope"])
        if item.get("agg_shard_count") in schema.SHARD_COUNTS:
            shards = int(item["agg_shard_count"])
        return Org(zone, scope, shards)
