"""The meter of a call that starts an asynchronous job. A job is paid once, however often its start is repeated: Bedrock
answers a repeat under the same `clientRequestToken` with the ARN of the job that it started before."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import orjson

from price_keeper.forwarding.forwarder import UpstreamTarget
from price_keeper.metering.usage import Usage
from price_keeper.model import Caller
from price_keeper.recording.entries import Account, Ended, Receipt
from price_keeper.recording.journal import Journal
from price_keeper.recording.meter import Meter, OperationPricing

MOST_JOBS: Final = 256  # of one caller; repeats come within minutes
MOST_CALLERS: Final = 1000
MOST_BYTES = 64 * 1024  # of an answer that holds an ARN and nothing else


class Jobs:
    """Those that were paid of late. Bounded for each caller, so that nobody makes another's be forgotten."""

    def __init__(self) -> None:
        self._paid: OrderedDict[Caller, OrderedDict[str, None]] = OrderedDict()

    def is_new(self, caller: Caller, arn: str) -> bool:
        """From then on it is not."""
        paid = self._paid.setdefault(caller, OrderedDict())
        self._paid.move_to_end(caller)
        if len(self._paid) > MOST_CALLERS:
            self._paid.popitem(last=False)
        if arn in paid:
            paid.move_to_end(arn)
            return False
        paid[arn] = None
        if len(paid) > MOST_JOBS:
            paid.popitem(last=False)
        return True


class JobMeter(Meter):
    __slots__ = ("_answer", "_caller", "_jobs")

    def __init__(
        self,
        jobs: Jobs,
        caller: Caller,
        journal: Journal,
        pricing: OperationPricing,
        account: Account,
        first: UpstreamTarget,
        guess: Usage,
        now: float,
        ends: tuple[Ended, ...] = (),
        most: int | None = None,
    ) -> None:
        super().__init__(journal, pricing, account, first, guess, now, ends, most)
        self._jobs = jobs
        self._caller = caller
        self._answer = b""

    def on_data(self, data: bytes) -> None:
        super().on_data(data)
        if len(self._answer) <= MOST_BYTES:
            self._answer += data

    def _receipt(self, is_whole: bool) -> Receipt | None:
        if self._status >= 300:
            return None
        arn = _arn(self._answer)
        return super()._receipt(is_whole) if not arn or self._jobs.is_new(self._caller, arn) else None


def _arn(answer: bytes) -> str:
    """Empty where the answer tells none: such a job is paid, as nobody knows that it was before."""
    try:
        arn = orjson.loads(answer)["invocationArn"]
    except (LookupError, TypeError, ValueError):
        return ""
    return arn if isinstance(arn, str) else ""
