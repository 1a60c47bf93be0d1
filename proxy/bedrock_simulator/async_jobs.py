"""The operations StartAsyncInvoke, ListAsyncInvokes and GetAsyncInvoke.

Jobs complete after 30 seconds and write nothing to S3.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qs

from bedrock_simulator.aws_errors import AwsError, constraint_violation, validation_error
from bedrock_simulator.clock import Clock
from bedrock_simulator.simulated_call import SimulatedCall, SimulatedResponse, check_choice

DURATION_SECONDS = 30.0

_ACCOUNT = "123456789012"
_MAX_JOBS = 1000  # beyond this the oldest are dropped
_MAX_LISTED = 1000


@dataclass(frozen=True, slots=True)
class _Job:
    arn: str
    model_arn: str
    token: str | None
    output: dict[str, Any]
    request: bytes  # the hash of the request
    submitted: float  # epoch seconds
    done: float  # by the monotonic clock


class AsyncJobs:
    def __init__(self, clock: Clock, region: str) -> None:
        self._clock = clock
        self._region = region
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._by_token: dict[str, str] = {}
        self._started = 0

    def start_job(self, call: SimulatedCall) -> SimulatedResponse:
        body = call.parse_body()
        for name in ("modelId", "modelInput", "outputDataConfig"):
            if body.get(name) is None:
                raise constraint_violation("null", name, "not be null")
        if not body["outputDataConfig"]["s3OutputDataConfig"]["s3Uri"].startswith("s3://"):
            raise validation_error("Invalid S3 URI in outputDataConfig.")
        token, request = body.get("clientRequestToken"), sha256(call.body).digest()
        earlier = self._jobs.get(self._by_token.get(token or "", ""))
        if earlier is not None:
            if earlier.request != request:
                raise AwsError("ConflictException")
            return SimulatedResponse(call.render({"invocationArn": earlier.arn}))
        job = self._build_job(body, token, request)
        self._remember(job)
        return SimulatedResponse(call.render({"invocationArn": job.arn}))

    def _build_job(self, body: dict[str, Any], token: str | None, request: bytes) -> _Job:
        self._started += 1
        identifier = sha256(b"%d" % self._started + request).hexdigest()[:12]
        model = body["modelId"]
        return _Job(
            f"arn:aws:bedrock:{self._region}:{_ACCOUNT}:async-invoke/{identifier}",
            model if model.startswith("arn:") else f"arn:aws:bedrock:{self._region}::foundation-model/{model}",
            token,
            body["outputDataConfig"],
            request,
            self._clock.now(),
            self._clock.monotonic() + DURATION_SECONDS,
        )

    def _remember(self, job: _Job) -> None:
        self._jobs[job.arn] = job
        if job.token:
            self._by_token[job.token] = job.arn
        if len(self._jobs) > _MAX_JOBS:
            _, oldest = self._jobs.popitem(last=False)
            if oldest.token:
                self._by_token.pop(oldest.token, None)

    def get_job(self, call: SimulatedCall) -> SimulatedResponse:
        job = self._jobs.get(call.route.labels[0])
        if job is None:
            raise validation_error("The provided invocation ARN is invalid or no longer known.")
        return SimulatedResponse(call.render(self._describe(job)))

    def list_jobs(self, call: SimulatedCall) -> SimulatedResponse:
        query = {name: values[0] for name, values in parse_qs(call.route.query).items()}
        jobs = [self._describe(job) for job in self._jobs.values() if _is_within(job, query)]
        if query.get("sortOrder", "Descending") == "Descending":
            jobs.reverse()
        if "statusEquals" in query:
            wanted = check_choice(query["statusEquals"], ("InProgress", "Completed", "Failed"), "statusEquals")
            jobs = [job for job in jobs if job["status"] == wanted]
        start, length = _parse_number(query, "nextToken", 0), _parse_number(query, "maxResults", _MAX_LISTED)
        document: dict[str, Any] = {"asyncInvokeSummaries": jobs[start : start + length]}
        if start + length < len(jobs):
            document["nextToken"] = str(start + length)
        return SimulatedResponse(call.render(document))

    def _describe(self, job: _Job) -> dict[str, Any]:
        is_done = self._clock.monotonic() >= job.done
        description: dict[str, Any] = {
            "invocationArn": job.arn,
            "modelArn": job.model_arn,
            "status": "Completed" if is_done else "InProgress",
            "submitTime": _format_time(job.submitted),
            "lastModifiedTime": _format_time(job.submitted + (DURATION_SECONDS if is_done else 0)),
            "outputDataConfig": job.output,
        }
        if is_done:
            description["endTime"] = description["lastModifiedTime"]
        if job.token:
            description["clientRequestToken"] = job.token
        return description


def _is_within(job: _Job, query: dict[str, str]) -> bool:
    after, before = _parse_time(query, "submitTimeAfter"), _parse_time(query, "submitTimeBefore")
    return (after is None or job.submitted >= after) and (before is None or job.submitted <= before)


def _parse_time(query: dict[str, str], name: str) -> float | None:
    if name not in query:
        return None
    try:
        return datetime.fromisoformat(query[name]).timestamp()
    except ValueError:
        raise constraint_violation(query[name], name, "be a timestamp") from None


def _parse_number(query: dict[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not text.isdecimal():
        raise constraint_violation(text, name, "be a whole number")
    return int(text)


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
