"""Every error that the product raises on purpose, in one tree.

PriceKeeperError
├── ConfigError            the configuration cannot be used; carries every mistake found
├── ListenFailed           an address cannot be listened on
├── JournalInUse           another process writes to this journal
├── JournalOwnerUnknown    a journal of another machine, whose process may still write to it
├── JournalUnusable        the journal's folder is missing, or cannot be written to
│   └── JournalFull        its disk has no space left
├── Refusal                a request is answered with an error of our own, in AWS's form
│   ├── InvalidRequest     400: the request is wrong; the message names what is allowed
│   ├── QuotaExceeded      400: every label that may serve it has used up its quota; a retry does not help
│   ├── AccessDenied       403: no token, or one that is not valid
│   │   ├── TokenRejected  403: a token that we signed: revoked, of an ended session, or not for this purpose
│   │   └── UnknownOrg     403: the caller is known, and the org is not registered
│   ├── TokenExpired       403: the token was valid
│   ├── UnknownOperation   404: only operations on the allow-list are forwarded
│   ├── NotFound           404: the org or app does not exist
│   ├── WriteConflict      409: somebody else changed it at the same time, and that change stands
│   ├── RequestTooLarge    413: larger than we or Bedrock accept
│   ├── TooManyRequests    429: the same call after a wait may succeed
│   ├── Busy               503: a limit of this process is reached; a retry helps
│   ├── SessionLimitRace   503: others kept logging this client in at the same time; carries the store's reasons
│   ├── RecordingUnavailable 503: the cost of the call could not be recorded, so it is not sent
│   ├── WorkerUnavailable  503: another process of this sidecar does not answer, or is not ready
│   ├── UpstreamUnavailable 503: Bedrock cannot be reached or did not answer; a retry helps
│   └── InternalError      500: a mistake of ours; the cause is in the log alone
└── StoreError             the store could not do what was asked
    ├── ConditionFailed    the condition of a single write did not hold; carries the item as it was
    ├── TransactionFailed  a transaction was refused whole; carries a reason for each of its writes
    ├── StoreThrottled     the store kept throttling; nothing was written
    ├── StoreUnavailable   no usable answer; `maybe_applied` says whether the write may have happened
    │   └── StoreAccessDenied  the store refuses our credentials, or there are none
    ├── StoreMisconfigured the store answers, but a table is missing or wrong
    └── InvalidStoreRequest  the store will never accept this request: it is a mistake of the caller
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeGuard


class PriceKeeperError(Exception):
    """The root, so that a caller at the edge can turn every expected failure into an answer."""


class ConfigError(PriceKeeperError):
    """All mistakes of a configuration at once; each problem is one line for a person."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class ListenFailed(PriceKeeperError):
    """Somebody else has the port, or it is not ours to take."""


class JournalOwnerUnknown(PriceKeeperError):
    """Nobody here can tell whether the process that writes this journal still runs."""


class JournalInUse(PriceKeeperError):
    """Two processes on one journal would each take the other's calls for lost ones."""


class JournalUnusable(PriceKeeperError):
    """A person has to mend it; the message says what is wrong."""


class JournalFull(JournalUnusable):
    """Room on the disk is all that is missing."""


class Refusal(PriceKeeperError):
    """Status and type are chosen so that SDKs retry where it helps, and only there.

    All three are public: `counted_as` is the label `kind` of the metric of refusals, whatever the class is called.
    """

    counted_as: str
    status = 400
    error_type = "ValidationException"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        self.message = message
        self.retry_after = retry_after
        super().__init__(message)


class InvalidRequest(Refusal):
    counted_as = "invalid_request"


class QuotaExceeded(Refusal):
    """Not 429, which clients take for a request to try again; none of them repeats a call for this."""

    counted_as = "quota_spent"
    error_type = "ServiceQuotaExceededException"


class AccessDenied(Refusal):
    counted_as = "access_denied"
    status = 403
    error_type = "AccessDeniedException"


class TokenRejected(AccessDenied):
    """Nobody comes by such a token by guessing, so it is not counted as a wrong secret."""

    counted_as = "no_guess"


class UnknownOrg(AccessDenied):
    """The token or identity is good. There is no budget to pay from."""

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
    """Not to be repeated blindly: what the other one did may be all that was wanted."""

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
    """The root of what a store may raise."""

    maybe_applied = False  # unless it is said, it is certain that nothing was written, and that nothing will be


class ConditionFailed(StoreError):
    """Nothing was written. `item` is what stood there when the condition was tested, None if nothing did."""

    def __init__(self, item: Mapping[str, Any] | None) -> None:
        self.item = item
        super().__init__("the condition of the write did not hold")


class ReasonCode(Enum):
    """Why one write of a refused transaction stood in the way, or that it did not."""

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

    With `maybe_applied` it was sent more than once, and an earlier attempt without an answer may still arrive."""

    def __init__(self, reasons: Sequence[CancellationReason], *, maybe_applied: bool = False) -> None:
        self.reasons = tuple(reasons)
        self.maybe_applied = maybe_applied
        codes = ", ".join(reason.code.value for reason in self.reasons)
        super().__init__(f"the transaction was refused: {codes}")


def is_condition_failure(failure: BaseException) -> TypeGuard[TransactionFailed]:
    """Whether a condition was tested and failed. Then no attempt was carried out before this one: a token that is
    remembered would have been answered with success."""
    if not isinstance(failure, TransactionFailed):
        return False
    return any(reason.code is ReasonCode.CONDITION_FAILED for reason in failure.reasons)


class StoreThrottled(StoreError):
    """Nothing was written, and trying again at once would not help."""


class StoreUnavailable(StoreError):
    """The store is away. Unless `maybe_applied`, it is certain that nothing was written."""

    def __init__(self, message: str, *, maybe_applied: bool = False) -> None:
        self.maybe_applied = maybe_applied
        super().__init__(message)


class StoreAccessDenied(StoreUnavailable):
    """Asking again at once would get the same answer, though credentials may be renewed later."""


class StoreMisconfigured(StoreError):
    """A person has to mend the store; the message says how."""


class InvalidStoreRequest(StoreError):
    """The request breaks one of the store's own rules, named in the message; nothing was written."""
