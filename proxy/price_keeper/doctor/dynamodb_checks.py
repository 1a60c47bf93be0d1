"""Checks of DynamoDB: reachable, with the tables of the schema, and with the permissions that the role needs.

Permissions are tested without writing: every write has a condition that no item can meet, and AWS checks permissions
before conditions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from price_keeper.doctor.auth_checks import CREDENTIALS_REMEDY
from price_keeper.doctor.doctor_checks import Finding, ok, skipped, trouble, warning
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.doctor.network_probe import (
    EndpointUnreachable,
    build_get_request,
    build_unreachable_finding,
    send_probe,
)
from price_keeper.doctor.permissions import TablePermissions, get_table_permissions
from price_keeper.errors import StoreAccessDenied, StoreError
from price_keeper.stores.contract import (
    ConditionCheck,
    Delete,
    ItemExists,
    ItemMissing,
    Key,
    Put,
    Query,
    Update,
    Write,
    all_of,
)
from price_keeper.stores.dynamodb_expressions import (
    TRANSACTION_VERBS,
    Request,
    build_query_request,
    build_write_request,
    key_to_wire,
)
from price_keeper.stores.schema import TABLES
from price_keeper.upstream.forwarder import parse_endpoint

NEVER_TRUE = all_of(ItemExists(), ItemMissing())
ACCESS_DENIED = "AccessDeniedException"
TABLE_MISSING = "ResourceNotFoundException"

# Error codes that AWS only returns to a request that IAM has allowed.
_ALLOWED_CODES = frozenset(
    (
        "ConditionalCheckFailedException",
        "ProvisionedThroughputExceededException",
        "ThrottlingException",
        "TransactionCanceledException",
    )
)
_ENDPOINT_KEYS = "store.endpoint and store.region"
_NOT_ON_DYNAMODB = "the store is a file of this machine"


class _PermissionProbe(NamedTuple):
    """One request that tests a permission. `action` is its name in an IAM policy."""

    action: str
    method: str
    table: str
    request: Request


async def check_dynamodb_reachable(context: DoctorContext) -> Finding:
    if not context.is_on_dynamodb:
        return skipped(_NOT_ON_DYNAMODB)
    endpoint = parse_endpoint((await context.dynamodb()).meta.endpoint_url)
    try:
        await send_probe(endpoint, build_get_request(endpoint), context.clock)
    except EndpointUnreachable as failure:
        return build_unreachable_finding(failure, endpoint, _ENDPOINT_KEYS)
    return ok(f"{endpoint.host}:{endpoint.port} answers")


async def check_tables(context: DoctorContext) -> Finding:
    if not context.is_on_dynamodb:
        return skipped(_NOT_ON_DYNAMODB)
    from price_keeper.stores import dynamodb_tables  # imports botocore, which is slow

    prefix = context.config.store.table_prefix
    try:
        states = await dynamodb_tables.read_table_states(await context.dynamodb(), prefix, context.clock.sleep)
    except StoreError as failure:
        return _judge_failure(failure)
    different = [f"{state.table}: {', '.join(state.differences)}" for state in states if state.differences]
    if not different:
        return ok(f"{len(states)} tables {prefix}*, all as they should be")
    missing = [state for state in states if not state.exists]
    message = (
        f"none of the {len(states)} tables {prefix}* exists" if len(missing) == len(states) else "; ".join(different)
    )
    return trouble(message, f"price-keeper tables create{context.source}; for what it cannot fix see docs/stores.md")


def _judge_failure(failure: StoreError) -> Finding:
    if ACCESS_DENIED in str(failure):
        actions = "DescribeTable, DescribeTimeToLive and DescribeContinuousBackups"
        return warning(
            "not allowed to describe the tables; no role needs that", f"to see them, allow dynamodb: {actions}"
        )
    if isinstance(failure, StoreAccessDenied):
        return trouble(str(failure), CREDENTIALS_REMEDY)
    return trouble(str(failure), f"let this machine reach DynamoDB, or correct {_ENDPOINT_KEYS}")


async def check_permissions(context: DoctorContext) -> Finding:
    if not context.is_on_dynamodb:
        return skipped(_NOT_ON_DYNAMODB)
    from price_keeper.stores import dynamodb_errors as errors

    client, probes = (
        await context.dynamodb(),
        _build_probes(context.config.store.table_prefix, get_table_permissions(context.role)),
    )
    try:
        codes = await asyncio.gather(*(_get_error_code(client, each) for each in probes))
    except errors.FAILURES as failure:
        return _judge_failure(errors.translate_error(failure))
    return _judge_permissions(probes, codes, context)


async def _get_error_code(client: Any, probe: _PermissionProbe) -> str:
    """The error code of the response, empty if the request succeeded."""
    from botocore.exceptions import ClientError

    try:
        await getattr(client, probe.method)(**probe.request)
    except ClientError as failure:
        code = str(failure.response.get("Error", {}).get("Code", ""))
        if code not in (ACCESS_DENIED, TABLE_MISSING, *_ALLOWED_CODES):
            raise
        return code
    return ""


def _judge_permissions(probes: Sequence[_PermissionProbe], codes: Sequence[str], context: DoctorContext) -> Finding:
    denied = [each for each, code in zip(probes, codes, strict=True) if code == ACCESS_DENIED]
    if denied:
        return _build_denied_finding(denied, context)
    if all(code == TABLE_MISSING for code in codes):
        return skipped("there are no tables to try them on")
    actions = ", ".join(dict.fromkeys(each.action for each in probes))
    return ok(f"{actions}: allowed; nothing was written")


def _build_denied_finding(denied: Sequence[_PermissionProbe], context: DoctorContext) -> Finding:
    by_action: dict[str, list[str]] = {}
    for each in denied:
        by_action.setdefault(each.action, []).append(each.table)
    message = "; ".join(f"{action} on {', '.join(tables)}" for action, tables in by_action.items())
    remedy = "; ".join(
        f"dynamodb:{action} on {', '.join(_build_table_arns(context, tables))}" for action, tables in by_action.items()
    )
    return trouble(f"not allowed: {message}", f"allow {remedy}")


def _build_table_arns(context: DoctorContext, tables: Sequence[str]) -> list[str]:
    store = context.config.store
    return [f"arn:aws:dynamodb:{store.region}:*:table/{store.table_prefix}{table}" for table in tables]


def _build_probes(prefix: str, permissions: TablePermissions) -> list[_PermissionProbe]:
    name = f"DOCTOR#{uuid4()}"  # the key of an item that does not exist
    keys = [Key(table, name, "DOCTOR" if TABLES[table].has_sort_key else "") for table in permissions]
    return [each for key in keys for each in _build_table_probes(key, prefix) if each.action in permissions[key.table]]


def _build_table_probes(key: Key, prefix: str) -> list[_PermissionProbe]:
    """One probe for each action that a policy may allow on the key's table."""
    put, update, delete = (
        Put(key, {}, NEVER_TRUE),
        Update(key, set={"at": 0}, condition=NEVER_TRUE),
        Delete(key, NEVER_TRUE),
    )
    item = {"TableName": prefix + key.table, "Key": key_to_wire(key)}
    batch = {"RequestItems": {prefix + key.table: {"Keys": [key_to_wire(key)]}}}
    return [
        _PermissionProbe("GetItem", "get_item", key.table, item),
        _PermissionProbe("BatchGetItem", "batch_get_item", key.table, batch),
        _PermissionProbe(
            "Query", "query", key.table, build_query_request(Query(key.table, key.pk), prefix) | {"Limit": 1}
        ),
        _PermissionProbe("PutItem", "put_item", key.table, build_write_request(put, prefix)),
        _PermissionProbe("UpdateItem", "update_item", key.table, build_write_request(update, prefix)),
        _PermissionProbe("DeleteItem", "delete_item", key.table, build_write_request(delete, prefix)),
        # IAM allows a transaction by the actions of its writes; ConditionCheckItem is the only action of its own.
        _build_transaction_probe("ConditionCheckItem", ConditionCheck(key, NEVER_TRUE), prefix),
    ]


def _build_transaction_probe(action: str, write: Write, prefix: str) -> _PermissionProbe:
    request = {"TransactItems": [{TRANSACTION_VERBS[type(write)]: build_write_request(write, prefix)}]}
    return _PermissionProbe(action, "transact_write_items", write.key.table, request)
