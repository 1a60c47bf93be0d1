"""Translates errors of botocore and aiohttp into StoreError. No other module reads DynamoDB's error codes.

`validate_response` runs before botocore's parser and rejects responses that did not come from DynamoDB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import aiohttp
import orjson
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigNotFound,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    MetadataRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)

from price_keeper.errors import (
    CancellationReason,
    ConditionFailed,
    InvalidStoreRequest,
    ReasonCode,
    StoreAccessDenied,
    StoreError,
    StoreMisconfigured,
    StoreThrottled,
    StoreUnavailable,
    TransactionFailed,
)
from price_keeper.stores.dynamodb_expressions import item_from_wire

# Every exception of a client call that does not indicate a bug in this program.
FAILURES = (BotoCoreError, ClientError, aiohttp.ClientError, OSError, TimeoutError)

_CREDENTIAL_ERRORS = (
    ConfigNotFound,
    CredentialRetrievalError,
    MetadataRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)

# DynamoDB's own operations. A credential provider may call other services during a call, and fail there.
_DYNAMODB_OPERATIONS = frozenset(
    {
        "BatchGetItem",
        "CreateTable",
        "DeleteItem",
        "DescribeContinuousBackups",
        "DescribeTable",
        "DescribeTimeToLive",
        "GetItem",
        "PutItem",
        "Query",
        "TransactWriteItems",
        "UpdateContinuousBackups",
        "UpdateItem",
        "UpdateTimeToLive",
    }
)

_THROTTLING_CODES = frozenset(
    {
        "ContinuousBackupsUnavailableException",  # a new table's backups are not ready yet
        "LimitExceededException",
        "ProvisionedThroughputExceededException",
        "ReplicatedWriteConflictException",
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
        "TransactionConflictException",  # another transaction is using the item; nothing was written
    }
)
_CREDENTIAL_CODES = frozenset(
    {
        "AccessDeniedException",
        "ExpiredTokenException",
        "IncompleteSignature",
        "IncompleteSignatureException",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "NotAuthorizedException",
        "RequestExpired",
        "UnrecognizedClientException",
    }
)
_PERMISSION_CODES = frozenset(
    {"AccessDeniedException", "NotAuthorizedException"}
)  # about these credentials, which are valid
_REASON_CODES = {
    "None": ReasonCode.NONE,
    "ConditionalCheckFailed": ReasonCode.CONDITION_FAILED,
    "TransactionConflict": ReasonCode.CONFLICT,
    "ProvisionedThroughputExceeded": ReasonCode.THROTTLED,
    "ThrottlingError": ReasonCode.THROTTLED,
}


# The messages with which DynamoDB reports that the key of a request does not match the table's key.
_KEY_MISMATCH_TEXTS = (
    "does not match the schema",
    "Missing the key ",
    "Type mismatch for key ",
    "missed key schema element",
)
_KEY_MISMATCH = "a table in DynamoDB has another key than it should; see: price-keeper tables check"


class MalformedStoreResponse(BotoCoreError):  # type: ignore[misc]
    """The response did not come from DynamoDB, for example from a proxy; botocore would read it as an empty result."""

    fmt = "a response with status {status} that did not come from DynamoDB"


def validate_response(response_dict: Mapping[str, Any], **_: Any) -> None:
    """A hook before botocore's parser. Responses with status 5xx may have any body."""
    status, body = response_dict["status_code"], response_dict["body"]
    headers = response_dict["headers"]
    if status >= 500:
        return
    is_signed = "x-amzn-requestid" in headers and headers.get("x-amz-crc32", str(crc32(body))) == str(crc32(body))
    if not is_signed or not _is_json_object(body):
        raise MalformedStoreResponse(status=status)


def _is_json_object(body: bytes) -> bool:
    try:
        return isinstance(orjson.loads(body), dict)
    except orjson.JSONDecodeError:
        return False


def translate_error(failure: BaseException) -> StoreError:
    if isinstance(failure, ClientError):
        if failure.operation_name not in _DYNAMODB_OPERATIONS:
            return StoreAccessDenied(f"no AWS credentials for DynamoDB: {failure.operation_name} failed")
        return _translate_response(failure.response)
    if isinstance(failure, _CREDENTIAL_ERRORS):
        return StoreAccessDenied(f"no AWS credentials for DynamoDB: {type(failure).__name__}")
    return StoreUnavailable(f"no answer from DynamoDB: {failure}", maybe_applied=not _was_never_sent(failure))


def has_refused_credentials(failure: ClientError) -> bool:
    """Whether DynamoDB rejected the credentials themselves, so that other credentials may help."""
    return failure.response.get("Error", {}).get("Code") in _CREDENTIAL_CODES - _PERMISSION_CODES


def _was_never_sent(failure: BaseException) -> bool:
    """Whether no connection was made. aiobotocore raises the same class when one broke during a request."""
    if isinstance(failure, EndpointConnectionError):
        return isinstance(failure.kwargs.get("error"), aiohttp.ClientConnectorError)
    return isinstance(failure, ConnectTimeoutError)


def is_transient(error: StoreError) -> bool:
    """Whether nothing was written and the same request may succeed shortly."""
    match error:
        case TransactionFailed(reasons=reasons):
            return all(reason.code is not ReasonCode.CONDITION_FAILED for reason in reasons)
        case StoreThrottled():
            return True
        case StoreUnavailable(maybe_applied=maybe_applied):
            return not maybe_applied and not isinstance(error, StoreAccessDenied)
    return False


def _translate_response(response: Mapping[str, Any]) -> StoreError:
    error = response.get("Error", {})
    code, message = error.get("Code", ""), error.get("Message", "")
    if code == "ConditionalCheckFailedException":
        return ConditionFailed(_parse_old_item(response))
    if code == "TransactionCanceledException":
        return _translate_cancellation(response.get("CancellationReasons", []), message)
    if code in _THROTTLING_CODES:
        return StoreThrottled(f"DynamoDB throttled the request: {code}")
    if code == "TransactionInProgressException":  # an earlier attempt under this token is running and may succeed
        return StoreUnavailable("a transaction with the same token is running", maybe_applied=True)
    if code == "ResourceNotFoundException":
        return StoreMisconfigured("a table is missing in DynamoDB; make it with: price-keeper tables create")
    if code == "ValidationException" and _is_key_mismatch(message):
        return StoreMisconfigured(_KEY_MISMATCH)
    if code in _CREDENTIAL_CODES:
        # AWS's message may quote a session token, so only the code is shown.
        return StoreAccessDenied(f"DynamoDB rejected the credentials: {code}")
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status >= 500 or not status:
        return StoreUnavailable(f"DynamoDB answered {status} {code}", maybe_applied=True)
    return InvalidStoreRequest(f"DynamoDB rejects the request: {code}: {message}")


def _is_key_mismatch(message: str) -> bool:
    """Whether the table's key differs from the schema. The table can be fixed, so the caller must retry later."""
    return any(words in message for words in _KEY_MISMATCH_TEXTS)


def _translate_cancellation(entries: list[Mapping[str, Any]], message: str) -> StoreError:
    for entry in entries:
        if _is_key_mismatch(entry.get("Message") or ""):
            return StoreMisconfigured(_KEY_MISMATCH)
        if entry.get("Code") not in _REASON_CODES:
            return InvalidStoreRequest(
                f"DynamoDB rejects the transaction: {entry.get('Code')}: {entry.get('Message', '')}"
            )
    if not entries:
        return InvalidStoreRequest(f"DynamoDB rejects the transaction: {message}")
    return TransactionFailed(
        [CancellationReason(_REASON_CODES[entry["Code"]], _parse_old_item(entry)) for entry in entries]
    )


def _parse_old_item(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    wire = answer.get("Item")
    return item_from_wire(wire) if wire else None
