"""What went wrong at DynamoDB, told in the store's own errors: the one place where botocore's are looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import aiohttp
import orjson
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
)

from proxy.errors import (
    ConditionFailed,
    NotAllowed,
    Reason,
    ReasonCode,
    Rejected,
    StoreError,
    StoreMisconfigured,
    StoreUnavailable,
    Throttled,
    TransactionFailed,
)
from proxy.stores.expressions import item_from_wire

# Everything a call through the client may raise that is no mistake of ours.
FAILURES = (BotoCoreError, ClientError, aiohttp.ClientError, OSError, TimeoutError)

# The request never reached DynamoDB, so nothing can have been written.
_NEVER_SENT = (EndpointConnectionError, ConnectTimeoutError)
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)

_THROTTLED = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "ThrottlingException",
        "RequestLimitExceeded",
        "LimitExceededException",
        "TransactionConflictException",  # a transaction holds the item this moment; nothing was written
        "TransactionInProgressException",
    }
)
_BAD_CREDENTIALS = frozenset(
    {
        "AccessDeniedException",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidSignatureException",
        "MissingAuthenticationTokenException",
        "MissingAuthenticationToken",
        "UnrecognizedClientException",
    }
)
_REASONS = {
    "None": ReasonCode.NONE,
    "ConditionalCheckFailed": ReasonCode.CONDITION_FAILED,
    "TransactionConflict": ReasonCode.CONFLICT,
    "ProvisionedThroughputExceeded": ReasonCode.THROTTLED,
    "ThrottlingError": ReasonCode.THROTTLED,
}


class Garbled(BotoCoreError):  # type: ignore[misc]
    """What came back is not DynamoDB speaking; botocore alone would read an empty answer out of it."""

    fmt = "an answer of status {status} that is no JSON object with the right checksum"


def require_sense(response_dict: Mapping[str, Any], **_: Any) -> None:
    """A hook before botocore's parser. A server's own failure may look as it likes."""
    status, body = response_dict["status_code"], response_dict["body"]
    checksum = response_dict["headers"].get("x-amz-crc32")
    if status >= 500:
        return
    if not _is_json_object(body) or (checksum is not None and checksum != str(crc32(body))):
        raise Garbled(status=status)


def _is_json_object(body: bytes) -> bool:
    try:
        return isinstance(orjson.loads(body), dict)
    except orjson.JSONDecodeError:
        return False


def translated(failure: BaseException) -> StoreError:
    if isinstance(failure, ClientError):
        return _from_answer(failure.response)
    if isinstance(failure, _NO_CREDENTIALS):
        return NotAllowed(f"no AWS credentials for DynamoDB: {failure}")
    was_sent = not isinstance(failure, _NEVER_SENT)
    return StoreUnavailable(f"no answer from DynamoDB: {failure}", maybe_applied=was_sent)


def is_passing(trouble: StoreError) -> bool:
    """Whether the same request may well succeed in a moment, nothing having been written."""
    match trouble:
        case TransactionFailed(reasons=reasons):
            return all(reason.code is not ReasonCode.CONDITION_FAILED for reason in reasons)
        case Throttled():
            return True
        case StoreUnavailable(maybe_applied=maybe_applied):
            return not maybe_applied and not isinstance(trouble, NotAllowed)
    return False


def _from_answer(response: Mapping[str, Any]) -> StoreError:
    error = response.get("Error", {})
    code, message = error.get("Code", ""), error.get("Message", "")
    if code == "ConditionalCheckFailedException":
        return ConditionFailed(_old_item(response))
    if code == "TransactionCanceledException":
        return _cancelled(response.get("CancellationReasons", []), message)
    if code in _THROTTLED:
        return Throttled(f"DynamoDB asks to slow down: {code}")
    if code == "ResourceNotFoundException":
        return StoreMisconfigured("a table is missing in DynamoDB; make it with: price-keeper tables create")
    if code in _BAD_CREDENTIALS:
        return NotAllowed(f"DynamoDB refuses our credentials: {code}: {message}")
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status >= 500 or not status:
        return StoreUnavailable(f"DynamoDB answered {status} {code}", maybe_applied=True)
    return Rejected(f"DynamoDB rejects the request: {code}: {message}")


def _cancelled(entries: list[Mapping[str, Any]], message: str) -> StoreError:
    for entry in entries:
        if entry.get("Code") not in _REASONS:
            return Rejected(f"DynamoDB rejects the transaction: {entry.get('Code')}: {entry.get('Message', '')}")
    if not entries:
        return Rejected(f"DynamoDB rejects the transaction: {message}")
    return TransactionFailed([Reason(_REASONS[entry["Code"]], _old_item(entry)) for entry in entries])


def _old_item(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    wire = answer.get("Item")
    return item_from_wire(wire) if wire else None
