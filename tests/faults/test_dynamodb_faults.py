"""Faults on the way to DynamoDB: nothing is written twice, and what may have been written is said to be unsure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from price_keeper.errors import (
    InvalidStoreRequest,
    ReasonCode,
    StoreAccessDenied,
    StoreMisconfigured,
    StoreThrottled,
    StoreUnavailable,
    TransactionFailed,
)
from price_keeper.stores import dynamodb
from price_keeper.stores.contract import Delete, Item, Key, Put, Query, Update
from price_keeper.stores.dynamodb import FIRST_BACKOFF_SECONDS, MAX_ATTEMPTS, MAX_BACKOFF_SECONDS, DynamoStore
from price_keeper.stores.dynamodb_errors import translate_error

from tests.support.engines import PREFIX, Engines
from tests.support.fault_proxy import (
    DYNAMODB,
    Answer,
    BlackHole,
    CutAnswer,
    DropAnswer,
    Fault,
    FaultProxy,
    Pass,
    Reset,
    dynamodb_error,
    fault_proxy,
)
from tests.support.ports import free_port

THROTTLE = dynamodb_error("ThrottlingException")
SERVER_ERROR = dynamodb_error("InternalServerError", 500)


@dataclass
class Rig:
    store: DynamoStore
    proxy: FaultProxy
    waits: list[float]
    direct: DynamoStore
    key: Key

    async def counted(self) -> int:
        found = await self.direct.get(self.key, consistent=True)
        return int((found or {}).get("n", 0))  # type: ignore[call-overload]


async def _store(endpoint: str, sleep: Callable[[float], Awaitable[None]]) -> DynamoStore:
    return await DynamoStore(region="us-east-1", table_prefix=PREFIX, endpoint=endpoint, sleep=sleep).open()


@pytest.fixture
async def rig(engines: Engines, tmp_path: Path, pk: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(dynamodb, "READ_TIMEOUT_SECONDS", 1.0)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with engines.open("ministack", tmp_path) as direct, fault_proxy(engines.endpoints["ministack"]) as proxy:
        assert isinstance(direct, DynamoStore)
        store = await _store(proxy.url, sleep)
        yield Rig(store, proxy, waits, direct, Key("rate-buckets", pk, "BUCKET#rpm"))
        await store.close()


def _addition(rig: Rig) -> Update:
    return Update(rig.key, add={"n": 1})


Verb = Callable[[Rig], Awaitable[Any]]

READS: dict[str, Verb] = {
    "get": lambda rig: rig.store.get(rig.key, consistent=True),
    "get_many": lambda rig: rig.store.get_many([rig.key]),
    "query": lambda rig: rig.store.query(Query("rate-buckets", rig.key.pk)),
}
SINGLE_WRITES: dict[str, Verb] = {
    "put": lambda rig: rig.store.put(Put(rig.key, {"n": 1})),
    "update": lambda rig: rig.store.update(_addition(rig)),
    "delete": lambda rig: rig.store.delete(Delete(rig.key)),
}
TRANSACT: Verb = lambda rig: rig.store.transact([_addition(rig)])  # noqa: E731
ALL_VERBS = READS | SINGLE_WRITES | {"transact": TRANSACT}


@pytest.mark.parametrize("verb", ALL_VERBS.values(), ids=ALL_VERBS.keys())
async def test_throttled_call_is_retried_with_jittered_backoff(rig: Rig, verb: Verb) -> None:
    rig.proxy.plan([THROTTLE] * (MAX_ATTEMPTS - 1))
    await verb(rig)
    assert rig.proxy.requests == MAX_ATTEMPTS
    assert len(rig.waits) == MAX_ATTEMPTS - 1
    longest = [min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**number) for number in range(MAX_ATTEMPTS - 1)]
    assert all(0 <= wait <= most for wait, most in zip(rig.waits, longest, strict=True))
    assert len(set(rig.waits)) == len(rig.waits)


@pytest.mark.parametrize("verb", ALL_VERBS.values(), ids=ALL_VERBS.keys())
async def test_long_throttling_gives_up_without_write(rig: Rig, verb: Verb) -> None:
    rig.proxy.plan([THROTTLE] * 100)
    with pytest.raises(StoreThrottled):
        await verb(rig)
    assert rig.proxy.requests == MAX_ATTEMPTS
    assert await rig.counted() == 0


LOST: dict[str, Fault] = {"dropped": DropAnswer(), "reset": Reset(), "cut": CutAnswer(), "server error": SERVER_ERROR}


@pytest.mark.parametrize("fault", [*LOST.values(), BlackHole()], ids=[*LOST.keys(), "black hole"])
@pytest.mark.parametrize("verb", SINGLE_WRITES.values(), ids=SINGLE_WRITES.keys())
async def test_unanswered_write_is_never_sent_again(rig: Rig, verb: Verb, fault: Fault) -> None:
    rig.proxy.plan([fault])
    with pytest.raises(StoreUnavailable) as refused:
        await verb(rig)
    assert refused.value.maybe_applied
    assert rig.proxy.requests == 1


@pytest.mark.parametrize("fault", [*LOST.values(), BlackHole()], ids=[*LOST.keys(), "black hole"])
@pytest.mark.parametrize("verb", READS.values(), ids=READS.keys())
async def test_unanswered_read_is_retried(rig: Rig, verb: Verb, fault: Fault) -> None:
    rig.proxy.plan([fault])
    await verb(rig)
    assert rig.proxy.requests == 2


@pytest.mark.parametrize("fault", LOST.values(), ids=LOST.keys())
async def test_unanswered_transaction_is_retried_and_applied_once(rig: Rig, fault: Fault) -> None:
    rig.proxy.plan([fault, fault])
    await TRANSACT(rig)
    assert rig.proxy.requests == 3
    assert await rig.counted() == 1


async def test_caller_token_makes_transaction_idempotent_across_calls(rig: Rig) -> None:
    rig.proxy.plan([DropAnswer()] * MAX_ATTEMPTS)
    with pytest.raises(StoreUnavailable) as refused:
        await rig.store.transact([_addition(rig)], token="the same")
    assert refused.value.maybe_applied
    await rig.store.transact([_addition(rig)], token="the same")
    assert await rig.counted() == 1


async def test_later_refusal_does_not_resolve_unknown_outcome(rig: Rig) -> None:
    rig.proxy.plan([DropAnswer(), *[THROTTLE] * 100])
    with pytest.raises(StoreUnavailable) as refused:
        await TRANSACT(rig)
    assert refused.value.maybe_applied
    assert await rig.counted() == 1


@pytest.mark.parametrize("verb", ALL_VERBS.values(), ids=ALL_VERBS.keys())
async def test_refused_connection_is_certainly_not_written(rig: Rig, verb: Verb) -> None:
    async def sleep(seconds: float) -> None:
        rig.waits.append(seconds)

    nobody = await _store(f"http://127.0.0.1:{free_port()}", sleep)
    with pytest.raises(StoreUnavailable) as refused:
        await verb(Rig(nobody, rig.proxy, rig.waits, rig.direct, rig.key))
    assert not refused.value.maybe_applied
    assert len(rig.waits) == MAX_ATTEMPTS - 1
    await nobody.close()


@pytest.mark.parametrize("status", [200, 403])
@pytest.mark.parametrize("body", [b"<html>Please sign in</html>", b"", b"[]", b"{"])
@pytest.mark.parametrize("verb", SINGLE_WRITES.values(), ids=SINGLE_WRITES.keys())
async def test_malformed_answer_counts_as_no_answer(rig: Rig, verb: Verb, body: bytes, status: int) -> None:
    rig.proxy.plan([Answer(status, body)] * 100)
    with pytest.raises(StoreUnavailable) as refused:
        await verb(rig)
    assert refused.value.maybe_applied
    assert rig.proxy.requests == 1


@pytest.mark.parametrize(
    "body", [b'{"status": "please log in"}', b'{"Attributes": {"n": {"N": "many"}}}', b'{"Attributes": 5}']
)
async def test_foreign_json_counts_as_no_answer(rig: Rig, body: bytes) -> None:
    for headers in ({}, DYNAMODB):
        rig.proxy.plan([Answer(200, body, headers)])
        with pytest.raises(StoreUnavailable) as refused:
            await rig.store.update(_addition(rig))
        assert refused.value.maybe_applied


@pytest.mark.parametrize("verb", READS)
async def test_consistent_read_is_requested_on_the_wire(rig: Rig, verb: str) -> None:
    seen: list[dict[str, Any]] = []
    real = rig.store.client._make_api_call

    async def spied(operation: str, request: dict[str, Any]) -> Any:
        seen.append(request.get("RequestItems", {f"{PREFIX}rate-buckets": request})[f"{PREFIX}rate-buckets"])
        return await real(operation, request)

    rig.store.client._make_api_call = spied
    for wanted in (True, False):
        calls = {
            "get": lambda wanted=wanted: rig.store.get(rig.key, consistent=wanted),
            "get_many": lambda wanted=wanted: rig.store.get_many([rig.key], consistent=wanted),
            "query": lambda wanted=wanted: rig.store.query(Query("rate-buckets", rig.key.pk, consistent=wanted)),
        }
        await calls[verb]()
    assert [request["ConsistentRead"] for request in seen] == [True, False]


async def test_foreign_refusal_does_not_resolve_unknown_outcome(rig: Rig) -> None:
    for later in (dynamodb_error("ValidationException"), _cancelled("TransactionConflict")):
        rig.proxy.plan([SERVER_ERROR, *[later] * 100])
        with pytest.raises(StoreUnavailable) as refused:
            await TRANSACT(rig)
        assert refused.value.maybe_applied


@pytest.mark.parametrize("is_sent_before", [False, True])
async def test_refusal_states_whether_earlier_attempt_may_still_arrive(rig: Rig, is_sent_before: bool) -> None:
    rig.proxy.plan([*[SERVER_ERROR] * is_sent_before, _cancelled("ConditionalCheckFailed")])
    with pytest.raises(TransactionFailed) as refused:
        await TRANSACT(rig)
    assert refused.value.maybe_applied is is_sent_before


async def test_transaction_in_progress_may_still_be_applied(rig: Rig) -> None:
    rig.proxy.plan([dynamodb_error("TransactionInProgressException")] * 100)
    with pytest.raises(StoreUnavailable) as refused:
        await TRANSACT(rig)
    assert refused.value.maybe_applied
    assert rig.proxy.requests == MAX_ATTEMPTS


async def test_close_waits_and_then_refuses_calls(rig: Rig) -> None:
    store = await _store(rig.proxy.url, _never)
    writes = [asyncio.ensure_future(store.update(_addition(rig))) for _ in range(5)]
    await asyncio.sleep(0)
    await store.close()
    assert sorted(item["n"] for item in await asyncio.gather(*writes)) == [1, 2, 3, 4, 5]  # type: ignore[type-var]
    with pytest.raises(StoreUnavailable, match="closed") as refused:
        await store.get(rig.key)
    assert not refused.value.maybe_applied


async def test_hanging_call_times_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamodb, "CALL_TIMEOUT_SECONDS", 0.2)
    for verb, is_unsure in ((READS["get"], False), (SINGLE_WRITES["put"], True), (TRANSACT, True)):
        rig.proxy.plan([BlackHole()] * 100)
        with pytest.raises(StoreUnavailable) as refused:
            await verb(rig)
        assert refused.value.maybe_applied is is_unsure


def test_credential_refusal_of_other_service_is_not_from_dynamodb() -> None:
    for code, status in (("AccessDenied", 403), ("InvalidIdentityToken", 400), ("ServiceUnavailable", 503)):
        answer = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
        trouble = translate_error(ClientError(answer, "AssumeRoleWithWebIdentity"))
        assert isinstance(trouble, StoreAccessDenied)
        assert not trouble.maybe_applied


async def test_session_token_quoted_by_aws_is_redacted(rig: Rig) -> None:
    quoted = dynamodb_error("InvalidSignatureException")
    body = quoted.body.replace(b"by the script", b"x-amz-security-token:SECRET")
    rig.proxy.plan([Answer(400, body, DYNAMODB)])
    with pytest.raises(StoreAccessDenied) as refused:
        await TRANSACT(rig)
    assert "SECRET" not in str(refused.value)


async def test_corrupted_answer_counts_as_no_answer(rig: Rig) -> None:
    await rig.direct.put(Put(rig.key, {"n": 1}))
    rig.proxy.plan([Answer(200, b'{"Item": {"n": {"N": "2"}}}', DYNAMODB | {"x-amz-crc32": "1"})])
    assert await rig.store.get(rig.key, consistent=True) == {"n": 1}
    assert rig.proxy.requests == 2


def _cancelled(*codes: str) -> Answer:
    reasons = [{"Code": code, "Message": "by the script"} for code in codes]
    return dynamodb_error("TransactionCanceledException", CancellationReasons=reasons)


async def test_transaction_conflict_is_retried(rig: Rig) -> None:
    rig.proxy.plan([_cancelled("TransactionConflict"), _cancelled("ThrottlingError")])
    await TRANSACT(rig)
    assert rig.proxy.requests == 3
    assert await rig.counted() == 1


async def test_lasting_transaction_conflict_has_reason_per_write(rig: Rig) -> None:
    rig.proxy.plan([_cancelled("None", "TransactionConflict")] * 100)
    with pytest.raises(TransactionFailed) as refused:
        await rig.store.transact([_addition(rig), Put(Key("rate-buckets", rig.key.pk, "other"), {})])
    assert [reason.code for reason in refused.value.reasons] == [ReasonCode.NONE, ReasonCode.CONFLICT]
    assert rig.proxy.requests == MAX_ATTEMPTS


async def test_failed_condition_is_not_retried_despite_conflict(rig: Rig) -> None:
    rig.proxy.plan([_cancelled("ConditionalCheckFailed", "TransactionConflict")])
    with pytest.raises(TransactionFailed):
        await TRANSACT(rig)
    assert rig.proxy.requests == 1


@pytest.mark.parametrize(
    "kind", ["TransactionConflictException", "ReplicatedWriteConflictException", "RequestLimitExceeded"]
)
async def test_conflicting_single_write_is_retried(rig: Rig, kind: str) -> None:
    rig.proxy.plan([dynamodb_error(kind)])
    await rig.store.update(_addition(rig))
    assert await rig.counted() == 1


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("ResourceNotFoundException", StoreMisconfigured),
        ("RequestExpired", StoreAccessDenied),
        ("AccessDeniedException", StoreAccessDenied),
        ("ExpiredTokenException", StoreAccessDenied),
        ("UnrecognizedClientException", StoreAccessDenied),
        ("ValidationException", InvalidStoreRequest),
        ("ItemCollectionSizeLimitExceededException", InvalidStoreRequest),
    ],
)
async def test_permanent_error_is_not_retried(rig: Rig, kind: str, error: type[Exception]) -> None:
    rig.proxy.plan([dynamodb_error(kind)] * 100)
    with pytest.raises(error):
        await TRANSACT(rig)
    assert rig.proxy.requests == 1


async def test_missing_table_says_what_to_do(engines: Engines, pk: str) -> None:
    endpoint = engines.endpoints["ministack"]
    store = await DynamoStore(region="us-east-1", table_prefix="nobody-", endpoint=endpoint, sleep=_never).open()
    with pytest.raises(StoreMisconfigured, match="price-keeper tables create"):
        await store.get(Key("config", pk, "CONFIG"))
    await store.close()


async def _never(seconds: float) -> None:
    raise AssertionError(f"nothing to wait for, yet {seconds} s were asked")


def _left_unread(key: Key) -> Answer:
    unread = f'{{"{PREFIX}rate-buckets": {{"Keys": [{{"PK": {{"S": "{key.pk}"}}, "SK": {{"S": "{key.sk}"}}}}]}}}}'
    return Answer(200, f'{{"Responses": {{}}, "UnprocessedKeys": {unread}}}'.encode(), DYNAMODB)


async def test_unprocessed_keys_are_requested_again(rig: Rig) -> None:
    item: Item = {"n": 7}
    await rig.direct.put(Put(rig.key, item))
    rig.proxy.plan([_left_unread(rig.key), _left_unread(rig.key)])
    assert await rig.store.get_many([rig.key], consistent=True) == [item]
    assert rig.proxy.requests == 3
    rig.proxy.plan([_left_unread(rig.key)] * 100)
    with pytest.raises(StoreThrottled):
        await rig.store.get_many([rig.key])


async def test_call_after_failure_succeeds(rig: Rig) -> None:
    rig.proxy.plan([DropAnswer(), Pass()])
    with pytest.raises(StoreUnavailable):
        await rig.store.update(_addition(rig))
    assert await rig.store.update(_addition(rig)) == {"n": 2}
