"""`price-keeper audit`: who changed what, and when."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from price_keeper.audit import MAX_RECORDS_PER_PAGE, read_records, build_record_json
from price_keeper.clock import SystemClock
from price_keeper.commands.places import select_config, open_selected_store
from price_keeper.commands.shared import CommandError, print_json, print_lines
from price_keeper.config import Config
from price_keeper.reporting.tenants import org_called, registered
from price_keeper.stores.contract import Store


def audit(args: Namespace) -> int:
    return asyncio.run(_audit(args, select_config(args)))


async def _audit(args: Namespace, config: Config) -> int:
    async with open_selected_store(config.store, SystemClock()) as store:
        found = await _found(store, await _org_named(store, args.org), args.limit)
    if args.json:
        print_json(found)
    else:
        print_lines([line for each in found for line in _lines(each)] or ["nothing was changed since this is kept"])
    return 0


async def _org_named(store: Store, text: str) -> str:
    try:
        return org_called(text, await registered(store))
    except ValueError as failure:
        raise CommandError(str(failure)) from None


async def _found(store: Store, org: str, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after: str | None = None
    while len(found) < limit:
        page = await read_records(store, org, min(MAX_RECORDS_PER_PAGE, limit - len(found)), after)
        found += [build_record_json(row) for row in page.rows]
        after = page.cursor
        if after is None:
            break
    return found


def _lines(record: Mapping[str, Any]) -> list[str]:
    whose = f" of {record['app']}" if record["app"] else ""
    where = f" from {record['address']}" if record["address"] else ""
    return [f"{record['at']}  {record['action']}{whose}, by {record['who']}{where}", *_changes(record)]


def _changes(record: Mapping[str, Any]) -> list[str]:
    """Only what is not as it was."""
    before, after = record["before"] or {}, record["after"] or {}
    names = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
    return [f"    {name}: {_shown(before.get(name))} -> {_shown(after.get(name))}" for name in names]


def _shown(value: Any) -> str:
    return "-" if value is None else json.dumps(value, ensure_ascii=False)
