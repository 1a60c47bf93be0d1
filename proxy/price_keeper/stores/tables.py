"""DynamoDB's tables as the schema wants them: made where missing, and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from price_keeper.errors import StoreMisconfigured, StoreThrottled
from price_keeper.stores import dynamodb_errors as errors
from price_keeper.stores.cloudformation import attribute_definitions, key_schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE
from price_keeper.stores.schema import TABLES, Table

POLLS = 60  # about a minute; a table on demand is there within seconds, its backups somewhat later
POLL_SECONDS = 1.0

Sleep: TypeAlias = Callable[[float], Awaitable[None]]

Client = Any  # botocore makes its clients at run time, so there is no type to name


@dataclass(frozen=True, slots=True)
class TableState:
    """What a person asked about a table: its differences from the schema, none when it is as it should be."""

    table: str
    exists: bool
    differences: tuple[str, ...]


async def create_missing(client: Client, prefix: str, sleep: Sleep, tell: Callable[[str, str], None]) -> None:
    """Makes what is missing and mends TTL and recovery where they are off; `tell(table, what)` reports each step."""
    existing = {table for table in TABLES.values() if await _describe(client, prefix + table.name, sleep) is not None}
    for table in TABLES.values():
        if table not in existing:
            await _create(client, prefix, table, sleep)
    for table in TABLES.values():
        await _wait_until_active(client, prefix + table.name, sleep)
        await _protect(client, prefix + table.name, sleep)
        tell(prefix + table.name, "was there" if table in existing else "created")


async def states(client: Client, prefix: str, sleep: Sleep) -> list[TableState]:
    return [await _state(client, prefix, table, sleep) for table in TABLES.values()]


async def _create(client: Client, prefix: str, table: Table, sleep: Sleep) -> None:
    with contextlib.suppress(client.exceptions.ResourceInUseException):  # somebody else is making it this moment
        await _ask(
            sleep,
            client.create_table,
            TableName=prefix + table.name,
            KeySchema=key_schema(table),
            AttributeDefinitions=attribute_definitions(table),
            BillingMode="PAY_PER_REQUEST",
        )


async def _wait_until_active(client: Client, name: str, sleep: Sleep) -> None:
    for _ in range(POLLS):
        found = await _describe(client, name, sleep)
        if found is not None and found["TableStatus"] == "ACTIVE":
            return
        await sleep(POLL_SECONDS)
    raise StoreMisconfigured(f"table {name} did not become active; see its state in DynamoDB's console")


async def _protect(client: Client, name: str, sleep: Sleep) -> None:
    if await _expiry_attribute(client, name, sleep) != EXPIRY_ATTRIBUTE:
        expiry = {"Enabled": True, "AttributeName": EXPIRY_ATTRIBUTE}
        await _ask(sleep, client.update_time_to_live, TableName=name, TimeToLiveSpecification=expiry)
    if not await _is_recoverable(client, name, sleep):
        recovery = {"PointInTimeRecoveryEnabled": True}
        await _ask(sleep, client.update_continuous_backups, TableName=name, PointInTimeRecoverySpecification=recovery)


async def _state(client: Client, prefix: str, table: Table, sleep: Sleep) -> TableState:
    name = prefix + table.name
    found = await _describe(client, name, sleep)
    if found is None:
        return TableState(name, False, ("it does not exist",))
    expiry = await _expiry_attribute(client, name, sleep)
    is_recoverable = await _is_recoverable(client, name, sleep)
    return TableState(name, True, tuple(_differences(table, found, expiry, is_recoverable)))


def _differences(table: Table, found: dict[str, Any], expiry: str | None, is_recoverable: bool) -> Sequence[str]:
    different = []
    if found["TableStatus"] not in ("ACTIVE", "UPDATING"):
        different.append(f"its status is {found['TableStatus']}")
    if found["KeySchema"] != key_schema(table):
        different.append(f"its key is {_told(found['KeySchema'])} and should be {_told(key_schema(table))}")
    wrong = [entry for entry in found["AttributeDefinitions"] if entry["AttributeType"] != "S"]
    if wrong:
        different.append(f"{', '.join(entry['AttributeName'] for entry in wrong)} should be a string")
    billing = found.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED")
    if billing != "PAY_PER_REQUEST":
        different.append(f"its billing mode is {billing} and should be PAY_PER_REQUEST")
    if expiry != EXPIRY_ATTRIBUTE:
        different.append(f"time to live is {'on ' + expiry if expiry else 'off'} and should be on {EXPIRY_ATTRIBUTE}")
    if not is_recoverable:
        different.append("point-in-time recovery is off")
    return different


def _told(keys: list[dict[str, str]]) -> str:
    return " + ".join(f"{key['AttributeName']} ({key['KeyType']})" for key in keys)


async def _describe(client: Client, name: str, sleep: Sleep) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = (await _ask(sleep, client.describe_table, TableName=name))["Table"]
    except client.exceptions.ResourceNotFoundException:
        return None
    return found


async def _expiry_attribute(client: Client, name: str, sleep: Sleep) -> str | None:
    answer = (await _ask(sleep, client.describe_time_to_live, TableName=name))["TimeToLiveDescription"]
    is_on = answer["TimeToLiveStatus"] in ("ENABLED", "ENABLING")
    return answer.get("AttributeName") if is_on else None


async def _is_recoverable(client: Client, name: str, sleep: Sleep) -> bool:
    answer = (await _ask(sleep, client.describe_continuous_backups, TableName=name))["ContinuousBackupsDescription"]
    recovery = answer.get("PointInTimeRecoveryDescription", {})
    return bool(recovery.get("PointInTimeRecoveryStatus") == "ENABLED")


async def _ask(sleep: Sleep, call: Callable[..., Awaitable[Any]], **request: Any) -> Any:
    """Asks again while DynamoDB says that it is too soon or too much; what a caller expects is raised as it comes."""
    for _ in range(POLLS):
        try:
            return await call(**request)
        except errors.FAILURES as failure:
            trouble = errors.translate_error(failure)
            if not isinstance(trouble, StoreThrottled):
                raise failure if _is_expected(failure) else trouble from None
        await sleep(POLL_SECONDS)
    raise trouble


def _is_expected(failure: BaseException) -> bool:
    code = getattr(failure, "response", {}).get("Error", {}).get("Code")
    return code in ("ResourceInUseException", "ResourceNotFoundException")
