"""The meter of a call that starts an asynchronous job. A job is paid once, however often its start is repeated: Bedrock
answers a repeat under the same `clientRequestToken` with the ARN of the job that it started before."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import orjson

from price_keeper.domain import Caller
from price_keeper.recording.entries import ChargedCounters, CompletionListener, Receipt
from price_keeper.recording.journal import Journal
from price_keeper.recording.meter import Meter, OperationPricing
from price_keeper.upstream.forwarder import UpstreamTarget
from price_keeper.usage.token_usage import Usage

MAX_JOBS_PER_CALLER: Final = 256  # of one caller; repeats come within minutes
MAX_CALLERS_WITH_JOBS: Final = 1000
MAX_JOB_ANSWER_BYTES = 64 * 1024  # of an answer that holds an ARN and nothing else


class PaidJobs:
    """Those that were paid of late. Bounded for each caller, so that nobody makes another's be forgotten."""

    def __init__(self) -> None:
        self._paid: OrderedDict[Caller, OrderedDict[str, None]] = OrderedDict()

    def add_if_new(self, caller: Caller, arn: str) -> bool:
        """From then on it is not."""
        paid = self._paid.setdefault(caller, OrderedDict())
        self._paid.move_to_end(caller)
        if len(self._paid) > MAX_CALLERS_WITH_JOBS:
            self._paid.popitem(last=False)
        if arn in paid:
            paid.move_to_end(arn)
            return False
        paid[arn] = None
        if len(paid) > MAX_JOBS_PER_CALLER:
            paid.popitem(last=False)
        return True


class JobMeter(Meter):
    __slots__ = ("_answer", "_caller", "_paid_jobs")

    def __init__(
        self,
        paid_jobs: PaidJobs,
        caller: Caller,
        journal: Journal,
        pricing: OperationPricing,
        charged: ChargedCounters,
        first_target: UpstreamTarget,
        assumed_usage: Usage,
        now: float,
        completion_listeners: tuple[CompletionListener, ...] = (),
        ceiling_pico: int | None = None,
    ) -> None:
        super().__init__(
            journal, pricing, charged, first_target, assumed_usage, now, completion_listeners, ceiling_pico
        )
        self._paid_jobs = paid_jobs
        self._caller = caller
        self._answer = b""

    def on_data(self, data: bytes) -> None:
        super().on_data(data)
        if len(self._answer) <= MAX_JOB_ANSWER_BYTES:
            self._answer += data

    def _build_receipt(self, is_whole: bool) -> Receipt | None:
        if self._status >= 300:
            return None
        arn = _read_job_arn(self._answer)
        return super()._build_receipt(is_whole) if not arn or self._paid_jobs.add_if_new(self._caller, arn) else None


def _read_job_arn(answer: bytes) -> str:
    """Empty where the answer tells none: such a job is paid, as nobody knows that it was before."""
    try:
        arn = orjson.loads(answer)["invocationArn"]
    except (LookupError, TypeError, ValueError):
        return ""
    return arn if isinstance(arn, str) else ""
