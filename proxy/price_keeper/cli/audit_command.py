"""`price-keeper audit`: who changed the settings of an org and its apps, newest first, read from the store."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from price_keeper.cli.output import CommandError, print_json, print_lines
from price_keeper.cli.store_selection import open_selected_store, select_config
from price_keeper.clock import SystemClock
from price_keeper.config import Config
from price_keeper.reports.org_directory import load_org_names, resolve_org
from price_keeper.stores.audit_log import MAX_RECORDS_PER_PAGE, build_record_json, read_records
from price_keeper.stores.contract import Store


def run_audit(args: Namespace) -> int:
    return asyncio.run(_print_audit(args, select_config(args)))


async def _print_audit(args: Namespace, config: Config) -> int:
    async with open_selected_store(config.store, SystemClock()) as store:
        records_found = await _read_changes(store, await _resolve_org(store, args.org), args.limit)
    if args.json:
        print_json(records_found)
    else:
        print_lines([line for each in records_found for line in _format_change(each)] or ["no changes are recorded"])
    return 0


async def _resolve_org(store: Store, text: str) -> str:
    try:
        return resolve_org(text, await load_org_names(store))
    except ValueError as failure:
        raise CommandError(str(failure)) from None


async def _read_changes(store: Store, org: str, limit: int) -> list[dict[str, Any]]:
    records_found: list[dict[str, Any]] = []
    cursor: str | None = None
    while len(records_found) < limit:
        page = await read_records(store, org, min(MAX_RECORDS_PER_PAGE, limit - len(records_found)), cursor)
        records_found += [build_record_json(row) for row in page.rows]
        cursor = page.cursor
        if cursor is None:
            break
    return records_found


def _format_change(record: Mapping[str, Any]) -> list[str]:
    app_text = f" of {record['app']}" if record["app"] else ""
    address_text = f" from {record['address']}" if record["address"] else ""
    return [
        f"{record['at']}  {record['action']}{app_text}, by {record['who']}{address_text}",
        *_format_differences(record),
    ]


def _format_differences(record: Mapping[str, Any]) -> list[str]:
    """One line for each setting that changed."""
    before, after = record["before"] or {}, record["after"] or {}
    names = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
    return [f"    {name}: {_format_setting(before.get(name))} -> {_format_setting(after.get(name))}" for name in names]


def _format_setting(value: Any) -> str:
    return "-" if value is None else json.dumps(value, ensure_ascii=False)
