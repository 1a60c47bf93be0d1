"""DynamoDB: reachable, with the tables that the schema wants, and willing to do for us what this role asks for.

Permissions are found out without writing: each write has a condition that no item can meet, and AWS looks at who asks
before it looks at the item.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from price_keeper.doctor.asking import EndpointUnreachable, send_probe, build_get_request
from price_keeper.doctor.findings import Finding, ok, skipped, trouble, warning
from price_keeper.doctor.identity import NO_CREDENTIALS
from price_keeper.doctor.needs import TablePermissions, get_table_permissions
from price_keeper.doctor.patient import DoctorContext
from price_keeper.doctor.reaching import build_unreachable_finding
from price_keeper.errors import StoreAccessDenied, StoreError
from price_keeper.forwarding.forwarder import endpoint_of
from price_keeper.stores.contract import ConditionCheck, Delete, ItemExists, ItemMissing, Key, Put, Query, Update, Write, all_of
from price_keeper.stores.expressions import TRANSACTION_VERBS, Request, key_to_wire, build_query_request, build_write_request
from price_keeper.stores.schema import TABLES

NEVER = all_of(ItemExists(), ItemMissing())
DENIED = "AccessDeniedException"
MISSING = "ResourceNotFoundException"

# What an answer may say that shows that we were let through.
_LET_THROUGH = frozenset(
    (
        "ConditionalCheckFailedException",
        "ProvisionedThroughputExceededException",
        "ThrottlingException",
        "TransactionCanceledException",
    )
)
_KEYS = "store.endpoint and store.region"
_NOT_HERE = "the store is a file of this machine"


class _Ask(NamedTuple):
    """One request. `action` is what it is called in a policy, `table` whose it is."""

    action: str
    method: str
    table: str
    request: Request


async def store_reached(context: DoctorContext) -> Finding:
    if not context.is_on_dynamodb:
        return skipped(_NOT_HERE)
    endpoint = endpoint_of((await context.dynamodb()).meta.endpoint_url)
    try:
        await send_probe(endpoint, build_get_request(endpoint), context.clock)
    except EndpointUnreachable as failure:
        return build_unreachable_finding(failure, endpoint, _KEYS)
    return ok(f"{endpoint.host}:{endpoint.port} answers")


async def store_tables(context: DoctorContext) -> Finding:
    if not context.is_on_dynamodb:
        return skipped(_NOT_HERE)
    from price_keeper.stores import tables  # brings botocore along

    prefix = context.config.store.table_prefix
    try:
        found = await tables.read_table_states(await context.dynamodb(), prefix, context.clock.sleep)
    except StoreError as failure:
        return _not_compared(failure)
    different = [f"{state.table}: {', '.join(state.differences)}" for state in found if state.differences]
    if not different:
        return ok(f"{len(found)} tables {prefix}*, all as they should be")
    missing = [state for state in found if not state.exists]
    told = f"none of the {len(found)} tables {prefix}* exists" if len(missing) == len(found) else "; ".join(different)
    return trouble(told, f"price-keeper tables create{context.source}; for what it cannot mend see docs/stores.md")


def _not_compared(failure: StoreError) -> Finding:
    if DENIED in str(failure):
        actions = "DescribeTable, DescribeTimeToLive and DescribeContinuousBackups"
        return warning("we may not look at the tables; no role need", f"to see them, allow dynamodb: {actions}")
    if isinstance(failure, StoreAccessDenied):
        return trouble(str(failure), NO_CREDENTIALS)
    return trouble(str(failure), f"let this machine reach DynamoDB, or correct {_KEYS}")


async def store_permissions(context: DoctorContext) -> Finding:
    if not context.is_on_dynamodb:
        return skipped(_NOT_HERE)
    from price_keeper.stores import dynamodb_errors as errors

    client, asks = await context.dynamodb(), _asks(context.config.store.table_prefix, get_table_permissions(context.role))
    try:
        codes = await asyncio.gather(*(_code(client, each) for each in asks))
    except errors.FAILURES as failure:
        return _not_compared(errors.translate_error(failure))
    return _judged(asks, codes, context)


async def _code(client: Any, asked: _Ask) -> str:
    """Empty for an answer without an error."""
    from botocore.exceptions import ClientError

    try:
        await getattr(client, asked.method)(**asked.request)
    except ClientError as failure:
        code = str(failure.response.get("Error", {}).get("Code", ""))
        if code not in (DENIED, MISSING, *_LET_THROUGH):
            raise
        return code
    return ""


def _judged(asks: Sequence[_Ask], codes: Sequence[str], context: DoctorContext) -> Finding:
    denied = [each for each, code in zip(asks, codes, strict=True) if code == DENIED]
    if denied:
        return _refused(denied, context)
    if all(code == MISSING for code in codes):
        return skipped("there are no tables to try them on")
    actions = ", ".join(dict.fromkeys(each.action for each in asks))
    return ok(f"{actions}: allowed; nothing was written")


def _refused(denied: Sequence[_Ask], context: DoctorContext) -> Finding:
    by_action: dict[str, list[str]] = {}
    for each in denied:
        by_action.setdefault(each.action, []).append(each.table)
    told = "; ".join(f"{action} on {', '.join(tables)}" for action, tables in by_action.items())
    mend = "; ".join(
        f"dynamodb:{action} on {', '.join(_arns(context, tables))}" for action, tables in by_action.items()
    )
    return trouble(f"not allowed: {told}", f"allow {mend}")


def _arns(context: DoctorContext, tables: Sequence[str]) -> list[str]:
    store = context.config.store
    return [f"arn:aws:dynamodb:{store.region}:*:table/{store.table_prefix}{table}" for table in tables]


def _asks(prefix: str, needs: TablePermissions) -> list[_Ask]:
    name = f"DOCTOR#{uuid4()}"  # of an item that nobody has
    keys = [Key(table, name, "DOCTOR" if TABLES[table].has_sort_key else "") for table in needs]
    return [each for key in keys for each in _asks_of(key, prefix) if each.action in needs[key.table]]


def _asks_of(key: Key, prefix: str) -> list[_Ask]:
    """One for each action that a policy may allow on the key's table."""
    put, update, delete = Put(key, {}, NEVER), Update(key, set={"at": 0}, condition=NEVER), Delete(key, NEVER)
    item = {"TableName": prefix + key.table, "Key": key_to_wire(key)}
    batch = {"RequestItems": {prefix + key.table: {"Keys": [key_to_wire(key)]}}}
    return [
        _Ask("GetItem", "get_item", key.table, item),
        _Ask("BatchGetItem", "batch_get_item", key.table, batch),
        _Ask("Query", "query", key.table, build_query_request(Query(key.table, key.pk), prefix) | {"Limit": 1}),
        _Ask("PutItem", "put_item", key.table, build_write_request(put, prefix)),
        _Ask("UpdateItem", "update_item", key.table, build_write_request(update, prefix)),
        _Ask("DeleteItem", "delete_item", key.table, build_write_request(delete, prefix)),
        # A transaction is allowed by what stands in it; of its own it has the check alone.
        _in_transaction("ConditionCheckItem", ConditionCheck(key, NEVER), prefix),
    ]


def _in_transaction(action: str, write: Write, prefix: str) -> _Ask:
    request = {"TransactItems": [{TRANSACTION_VERBS[type(write)]: build_write_request(write, prefix)}]}
    return _Ask(action, "transact_write_items", write.key.table, request)
