"""The audit log: one immutable record for each administrative change, written in the transaction of the change.

A record exists if and only if its change was committed. Records hold settings only, never a secret, hash, token or
prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

from price_keeper.domain import Scope
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Item, ItemMissing, Page, Put, Query, Store, StoredRow, Value

AUDIT_RETENTION_SECONDS = 400 * 86_400
MAX_RECORDS_PER_PAGE = 100


@dataclass(frozen=True, slots=True)
class Actor:
    """Who makes a change, and in which request. `address` is the network address that the request came from."""

    who: str
    request_id: str
    address: str = ""

    def build_record(self, action: str, scope: Scope, before: Item | None, after: Item | None, now: float) -> Put:
        """The write of one record. `before` is None when the change creates something, `after` when it deletes."""
        item: dict[str, Value] = {
            "action": action,
            "who": self.who,
            "request_id": self.request_id,
            "at_epoch": Decimal(str(round(now, 6))),
            EXPIRY_ATTRIBUTE: int(now) + AUDIT_RETENTION_SECONDS,
        }
        optional_attributes = {"app": scope.app, "address": self.address, "before": before, "after": after}
        item |= {name: _to_item_value(value) for name, value in optional_attributes.items() if value not in (None, "")}
        return Put(schema.audit_record_key(scope.org, f"{_format_time(now)}#{uuid4().hex}"), item, ItemMissing())


def select_attributes(item: Item | None, names: tuple[str, ...]) -> Item | None:
    """The named attributes of an item, so that credentials on the same item stay out of the record."""
    return None if item is None else {name: item[name] for name in names if name in item}


async def read_records(store: Store, org: str, limit: int, after: str | None = None) -> Page:
    """One page of an org's records, the newest first. `after` is the cursor of the previous page."""
    partition = schema.audit_record_key(org, "")
    return await store.query(
        Query("audit", partition.pk, descending=True, limit=limit, after=after or None, consistent=True)
    )


def build_record_json(row: StoredRow) -> dict[str, Any]:
    """A record as the control API and `--json` output return it."""
    item = row.item
    return {
        "id": row.key.sk,
        "at": row.key.sk.partition("#")[0],
        "action": item.get("action"),
        "who": item.get("who"),
        "address": item.get("address"),
        "request_id": item.get("request_id"),
        "app": item.get("app"),
        "before": to_json_value(item.get("before")),
        "after": to_json_value(item.get("after")),
    }


def to_json_value(value: Any) -> Any:
    """A stored value as a JSON value."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return {str(name): to_json_value(part) for name, part in value.items()}
    if isinstance(value, list):
        return [to_json_value(part) for part in value]
    return value.hex() if isinstance(value, bytes) else value


def _to_item_value(value: Any) -> Value:
    return dict(value) if isinstance(value, Mapping) else value


def _format_time(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
