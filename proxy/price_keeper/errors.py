"""Every error that the product raises on purpose, in one tree.

PriceKeeperError
├── ConfigError            the configuration cannot be used; carries every mistake found
├── ListenFailed           an address cannot be listened on
├── JournalInUse           another process writes to this journal
├── JournalOwnerUnknown    the journal belongs to another machine, whose process may still write to it
├── JournalUnusable        the journal's folder is missing, or cannot be written to
│   └── JournalFull        the journal's disk is full
├── Refusal                the proxy itself answers a request with an error, in AWS's form
│   ├── InvalidRequest     400: the request is wrong; the message names what is allowed
│   ├── QuotaExceeded      400: every label that may serve it has used up its quota; a retry does not help
│   ├── AccessDenied       403: no token, or one that is not valid
│   │   ├── TokenRejected  403: a token with a valid signature: revoked, of an ended session, or of the wrong purpose
│   │   └── UnknownOrg     403: the token is valid, but its org is not registered
│   ├── TokenExpired       403: the token was valid
│   ├── UnknownOperation   404: only operations on the allow-list are forwarded
│   ├── NotFound           404: the org or app does not exist
│   ├── WriteConflict      409: a concurrent change won; nothing was written
│   ├── RequestTooLarge    413: larger than the proxy or Bedrock accepts
│   ├── TooManyRequests    429: the same call after a wait may succeed
│   ├── Busy               503: a limit of this process is reached; a retry helps
│   ├── SessionLimitRace   503: concurrent logins of the same client kept conflicting; carries the store's reasons
│   ├── RecordingUnavailable 503: the cost of the call could not be recorded, so it is not sent
│   ├── WorkerUnavailable  503: another process of this sidecar does not answer, or is not ready
│   ├── UpstreamUnavailable 503: Bedrock cannot be reached or did not answer; a retry helps
│   └── InternalError      500: a bug in the proxy; only the log has the cause
└── StoreError             the store could not carry out an operation
    ├── ConditionFailed    the condition of a single write did not hold; carries the item as it was
    ├── TransactionFailed  a transaction was rolled back; carries a reason for each of its writes
    ├── StoreThrottled     the store kept throttling; nothing was written
    ├── StoreUnavailable   no usable response; `maybe_applied` says whether the write may have happened
    │   ├── StoreAccessDenied  the store rejects the process's credentials, or there are none
    │   └── StoreReadOnly  the store answers, and takes no writes: its file or disk is read-only
    ├── StoreMisconfigured the store responds, but a table is missing or wrong
    └── InvalidStoreRequest  the store will never accept this request: a bug in the calling code
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeGuard


class PriceKeeperError(Exception):
    """The root of all expected errors, so that entry points can turn each of them into a response or a message."""


class ConfigError(PriceKeeperError):
    """All mistakes of a configuration at once; each problem is one line for the operator."""

    is_located = True  # each line begins with a place: a file, a line of it, or a key

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class ListenFailed(PriceKeeperError):
    """The port is in use, the process may not bind it, or the address does not exist."""


class JournalOwnerUnknown(PriceKeeperError):
    """The journal's lock names another machine, so it is unknown whether that process still writes to the journal."""


class JournalInUse(PriceKeeperError):
    """Another process has the journal's lock. Of two processes on one journal, each would recover the other's open
    calls as lost ones."""


class JournalUnusable(PriceKeeperError):
    """The operator has to repair the journal; the message says what is wrong."""


class JournalFull(JournalUnusable):
    """The journal works again as soon as its disk has space."""


class Refusal(PriceKeeperError):
    """A request that the proxy answers with an error of its own.

    `status` and `error_type` are chosen so that SDKs retry where a retry helps, and only there. Both are public, and so
    is `counted_as`: the value of the label `kind` in the metric `refusals_total`, independent of the class name.
    """

    counted_as: str
    status = 400
    error_type = "ValidationException"

    def __init__(
        self, message: str, *, retry_after: float | None = None, details: Mapping[str, Any] | None = None
    ) -> None:
        """`details` has for programs what the message says in names: ids, period, time of the reset."""
        self.message = message
        self.retry_after = retry_after
        self.details = details
        super().__init__(message)


class InvalidRequest(Refusal):
    counted_as = "invalid_request"


class QuotaExceeded(Refusal):
    """Not 429, because clients retry that; no SDK retries this error type."""

    counted_as = "quota_spent"
    error_type = "ServiceQuotaExceededException"


class AccessDenied(Refusal):
    counted_as = "access_denied"
    status = 403
    error_type = "AccessDeniedException"


class TokenRejected(AccessDenied):
    """Has a valid signature, so it is not a guess and does not count as a failed login."""

    counted_as = "no_guess"


class UnknownOrg(AccessDenied):
    """The token or identity is valid, but its org is not registered, so there is no budget to charge."""

    counted_as = "unknown_org"


class TokenExpired(Refusal):
    counted_as = "token_expired"
    status = 403
    error_type = "ExpiredTokenException"


class UnknownOperation(Refusal):
    counted_as = "unknown_operation"
    status = 404
    error_type = "UnknownOperationException"


class NotFound(Refusal):
    counted_as = "not_there"
    status = 404
    error_type = "ResourceNotFoundException"


class WriteConflict(Refusal):
    """A client should read again before it retries: the concurrent change may already have the wanted effect."""

    counted_as = "overtaken"
    status = 409
    error_type = "ConflictException"


class RequestTooLarge(Refusal):
    counted_as = "too_large"
    status = 413


class TooManyRequests(Refusal):
    counted_as = "slow_down"
    status = 429
    error_type = "ThrottlingException"


class Busy(Refusal):
    counted_as = "busy"
    status = 503
    error_type = "ServiceUnavailableException"


class SessionLimitRace(Refusal):
    """Nothing was written. `reasons` has one entry for each write of the last attempt."""

    counted_as = "session_limit_race"
    status = 503
    error_type = "ServiceUnavailableException"

    def __init__(self, message: str, reasons: Sequence[CancellationReason], *, retry_after: float) -> None:
        self.reasons = tuple(reasons)
        super().__init__(message, retry_after=retry_after)


class RecordingUnavailable(Refusal):
    counted_as = "cannot_record"
    status = 503
    error_type = "ServiceUnavailableException"


class WorkerUnavailable(Refusal):
    counted_as = "worker_away"
    status = 503
    error_type = "ServiceUnavailableException"


class UpstreamUnavailable(Refusal):
    counted_as = "upstream_away"
    status = 503
    error_type = "ServiceUnavailableException"


class InternalError(Refusal):
    counted_as = "our_fault"
    status = 500
    error_type = "InternalServerException"


class StoreError(PriceKeeperError):
    """The root of all errors of a store."""

    maybe_applied = False  # by default nothing was written, and no attempt that is still in flight will write


class ConditionFailed(StoreError):
    """Nothing was written. `item` is the item for which the condition failed, or None if there was none."""

    def __init__(self, item: Mapping[str, Any] | None) -> None:
        self.item = item
        super().__init__("the condition of the write did not hold")


class ReasonCode(Enum):
    """Why one write made its transaction fail; NONE if it did not."""

    NONE = "none"
    CONDITION_FAILED = "condition failed"
    CONFLICT = "conflict"
    THROTTLED = "throttled"


@dataclass(frozen=True, slots=True)
class CancellationReason:
    code: ReasonCode
    item: Mapping[str, Any] | None = None


class TransactionFailed(StoreError):
    """Nothing was written. `reasons` has one entry for each write, in the order they were given.

    With `maybe_applied` it was sent more than once, and an earlier attempt without a response may still be applied."""

    def __init__(self, reasons: Sequence[CancellationReason], *, maybe_applied: bool = False) -> None:
        self.reasons = tuple(reasons)
        self.maybe_applied = maybe_applied
        codes = ", ".join(reason.code.value for reason in self.reasons)
        super().__init__(f"the transaction was refused: {codes}")


def is_condition_failure(failure: BaseException) -> TypeGuard[TransactionFailed]:
    """Whether a condition was tested and failed. Then no earlier attempt was applied either: the store would have
    recognised its idempotency token and reported success."""
    if not isinstance(failure, TransactionFailed):
        return False
    return any(reason.code is ReasonCode.CONDITION_FAILED for reason in failure.reasons)


class StoreThrottled(StoreError):
    """Nothing was written, and an immediate retry would not help."""


class StoreUnavailable(StoreError):
    """The store is unreachable. Unless `maybe_applied` is set, nothing was written."""

    def __init__(self, message: str, *, maybe_applied: bool = False) -> None:
        self.maybe_applied = maybe_applied
        super().__init__(message)


class StoreAccessDenied(StoreUnavailable):
    """The store rejects the credentials. An immediate retry would fail too, but credentials may be renewed later."""


class StoreReadOnly(StoreUnavailable):
    """Reads still work. It stays so until an operator makes the file, its folder or its disk writable."""


class StoreMisconfigured(StoreError):
    """The operator has to repair the store; the message says how."""


class InvalidStoreRequest(StoreError):
    """The request violates a rule of the store, which the message names; nothing was written."""
