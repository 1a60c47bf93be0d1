"""Creates the DynamoDB tables of the schema where they are missing, and compares those that exist.

`create_missing_tables` also switches on time to live, point-in-time recovery and deletion protection. It never deletes
a table, and changes no key, encryption or tag of one that exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from price_keeper.errors import StoreMisconfigured, StoreThrottled
from price_keeper.stores import dynamodb_errors as errors
from price_keeper.stores.cloudformation import build_attribute_definitions, build_key_schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE
from price_keeper.stores.schema import TABLES, Table

POLLS = 60  # about a minute; an on-demand table is active within seconds, its backups somewhat later
POLL_SECONDS = 1.0

Sleep: TypeAlias = Callable[[float], Awaitable[None]]

Client = Any  # botocore creates its client classes at run time, so there is no static type


@dataclass(frozen=True, slots=True)
class TableState:
    """Whether a table exists, and how it differs from the schema; no differences mean that it is correct."""

    table: str
    exists: bool
    differences: tuple[str, ...]


async def create_missing_tables(
    client: Client,
    prefix: str,
    sleep: Sleep,
    on_step: Callable[[str, str], None],
    kms_key: str | None = None,
    tags: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Create missing tables, and enable TTL, point-in-time recovery and deletion protection where they are off.

    New tables get `tags`, and are encrypted with `kms_key`, or else with the key that DynamoDB owns. Idempotent.
    `on_step(table, step)` is called after each table.
    """
    options: dict[str, Any] = {}
    if kms_key is not None:
        options["SSESpecification"] = {"Enabled": True, "SSEType": "KMS", "KMSMasterKeyId": kms_key}
    if tags:
        options["Tags"] = [{"Key": key, "Value": value} for key, value in tags.items()]
    existing = {table for table in TABLES.values() if await _describe(client, prefix + table.name, sleep) is not None}
    for table in TABLES.values():
        if table not in existing:
            await _create_table(client, prefix, table, sleep, options)
    for table in TABLES.values():
        description = await _wait_until_active(client, prefix + table.name, sleep)
        await _enable_protection(client, prefix + table.name, sleep, description)
        on_step(prefix + table.name, "was there" if table in existing else "created")


async def read_table_states(client: Client, prefix: str, sleep: Sleep) -> list[TableState]:
    return [await _read_table_state(client, prefix, table, sleep) for table in TABLES.values()]


async def _create_table(client: Client, prefix: str, table: Table, sleep: Sleep, options: dict[str, Any]) -> None:
    with contextlib.suppress(client.exceptions.ResourceInUseException):  # another process is creating it
        await _call_with_retries(
            sleep,
            client.create_table,
            TableName=prefix + table.name,
            KeySchema=build_key_schema(table),
            AttributeDefinitions=build_attribute_definitions(table),
            BillingMode="PAY_PER_REQUEST",
            DeletionProtectionEnabled=True,
            **options,
        )


async def _wait_until_active(client: Client, name: str, sleep: Sleep) -> dict[str, Any]:
    for _ in range(POLLS):
        description = await _describe(client, name, sleep)
        if description is not None and description["TableStatus"] == "ACTIVE":
            return description
        await sleep(POLL_SECONDS)
    raise StoreMisconfigured(f"table {name} did not become active; see its state in DynamoDB's console")


async def _enable_protection(client: Client, name: str, sleep: Sleep, description: dict[str, Any]) -> None:
    if not _is_protected(description):
        await _call_with_retries(sleep, client.update_table, TableName=name, DeletionProtectionEnabled=True)
        await _wait_until_active(client, name, sleep)
    if await _expiry_attribute(client, name, sleep) != EXPIRY_ATTRIBUTE:
        expiry = {"Enabled": True, "AttributeName": EXPIRY_ATTRIBUTE}
        await _call_with_retries(sleep, client.update_time_to_live, TableName=name, TimeToLiveSpecification=expiry)
    if not await _is_recoverable(client, name, sleep):
        recovery = {"PointInTimeRecoveryEnabled": True}
        await _call_with_retries(
            sleep, client.update_continuous_backups, TableName=name, PointInTimeRecoverySpecification=recovery
        )


async def _read_table_state(client: Client, prefix: str, table: Table, sleep: Sleep) -> TableState:
    name = prefix + table.name
    description = await _describe(client, name, sleep)
    if description is None:
        return TableState(name, False, ("it does not exist",))
    expiry = await _expiry_attribute(client, name, sleep)
    is_recoverable = await _is_recoverable(client, name, sleep)
    return TableState(name, True, tuple(_find_differences(table, description, expiry, is_recoverable)))


def _find_differences(
    table: Table, description: dict[str, Any], expiry: str | None, is_recoverable: bool
) -> Sequence[str]:
    different = []
    if description["TableStatus"] not in ("ACTIVE", "UPDATING"):
        different.append(f"its status is {description['TableStatus']}")
    if description["KeySchema"] != build_key_schema(table):
        expected_key = _format_key_schema(build_key_schema(table))
        different.append(f"its key is {_format_key_schema(description['KeySchema'])} and should be {expected_key}")
    wrong = [entry for entry in description["AttributeDefinitions"] if entry["AttributeType"] != "S"]
    if wrong:
        different.append(f"{', '.join(entry['AttributeName'] for entry in wrong)} should be a string")
    billing = description.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED")
    if billing != "PAY_PER_REQUEST":
        different.append(f"its billing mode is {billing} and should be PAY_PER_REQUEST")
    if expiry != EXPIRY_ATTRIBUTE:
        different.append(f"time to live is {'on ' + expiry if expiry else 'off'} and should be on {EXPIRY_ATTRIBUTE}")
    if not is_recoverable:
        different.append("point-in-time recovery is off")
    if not _is_protected(description):
        different.append("deletion protection is off")
    return different


def _is_protected(description: dict[str, Any]) -> bool:
    return bool(description.get("DeletionProtectionEnabled"))


def _format_key_schema(keys: list[dict[str, str]]) -> str:
    return " + ".join(f"{key['AttributeName']} ({key['KeyType']})" for key in keys)


async def _describe(client: Client, name: str, sleep: Sleep) -> dict[str, Any] | None:
    try:
        description: dict[str, Any] = (await _call_with_retries(sleep, client.describe_table, TableName=name))["Table"]
    except client.exceptions.ResourceNotFoundException:
        return None
    return description


async def _expiry_attribute(client: Client, name: str, sleep: Sleep) -> str | None:
    answer = (await _call_with_retries(sleep, client.describe_time_to_live, TableName=name))["TimeToLiveDescription"]
    is_on = answer["TimeToLiveStatus"] in ("ENABLED", "ENABLING")
    return answer.get("AttributeName") if is_on else None


async def _is_recoverable(client: Client, name: str, sleep: Sleep) -> bool:
    answer = (await _call_with_retries(sleep, client.describe_continuous_backups, TableName=name))[
        "ContinuousBackupsDescription"
    ]
    recovery = answer.get("PointInTimeRecoveryDescription", {})
    return bool(recovery.get("PointInTimeRecoveryStatus") == "ENABLED")


async def _call_with_retries(sleep: Sleep, call: Callable[..., Awaitable[Any]], **request: Any) -> Any:
    """Retry while DynamoDB answers that a table is busy or that it is throttled; expected errors are raised at once."""
    for _ in range(POLLS):
        try:
            return await call(**request)
        except errors.FAILURES as failure:
            error = errors.translate_error(failure)
            if not isinstance(error, StoreThrottled):
                raise failure if _is_expected(failure) else error from None
        await sleep(POLL_SECONDS)
    raise error


def _is_expected(failure: BaseException) -> bool:
    response = getattr(failure, "response", None) or {}  # None where none came
    code = response.get("Error", {}).get("Code")
    return code in ("ResourceInUseException", "ResourceNotFoundException")
