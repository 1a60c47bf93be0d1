"""Ask Bedrock how many input tokens a call has, if its bytes do not bound them. Counting is free of charge."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence

import orjson

from price_keeper import operations
from price_keeper.errors import InvalidRequest, TooManyRequests, UpstreamUnavailable
from price_keeper.exchange import FlowControl, Header
from price_keeper.operations import BodyForm, Operation
from price_keeper.tasks import run_large_work
from price_keeper.upstream.forwarder import THROTTLED, Forwarder, UpstreamCall, UpstreamTarget

MAX_RESPONSE_BYTES = 64 * 1024  # of a response that holds one number
TIMEOUT_SECONDS = 20.0  # short compared with a model's response, as the caller waits for both
_CONVERSE = operations.find_operations(BodyForm.CONVERSE)
_COUNTED_FIELDS = ("messages", "system", "toolConfig", "additionalModelRequestFields")
# Members that do not reach the model. All others that are not counted are bounded by UNCOUNTED_TOKENS_PER_BYTE.
_IGNORED_FIELDS = frozenset(
    {
        "additionalModelResponseFieldPaths",
        "inferenceConfig",
        "performanceConfig",
        "requestMetadata",
        "serviceTier",
    }
)
LARGE_BYTES = 256 * 1024
UNCOUNTED_TOKENS_PER_BYTE = 2  # for what is not sent to be counted: more than any tokenizer makes of a byte
_HEADERS = (("content-type", "application/json"), ("accept", "application/json"))


class TokenCounter:
    """Counts the input tokens of a call through Bedrock's CountTokens operation."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    async def __call__(self, target: UpstreamTarget, operation: Operation, body: bytes) -> int:
        """Return the number of input tokens. Raises InvalidRequest, UpstreamUnavailable and TooManyRequests."""
        path = operations.OperationPath(Operation.COUNT_TOKENS, target.model).path
        large = len(body) > LARGE_BYTES
        counted, uncounted = (
            await run_large_work(_build_request, operation, body) if large else _build_request(operation, body)
        )
        call = UpstreamCall("POST", "", _HEADERS, lambda _: counted, (target._replace(path=path),))
        answer = _CountResponder()
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self._forwarder.forward(call, answer, (), _NullObserver())
        except TimeoutError:
            answer.abandon()
            raise UpstreamUnavailable(
                f"Bedrock did not count the tokens of this call in {TIMEOUT_SECONDS:g} s", retry_after=1
            ) from None
        return answer.parse_tokens() + uncounted


def _build_request(operation: Operation, body: bytes) -> tuple[bytes, int]:
    """Build the request to count, and an upper bound for the tokens of the rest."""
    if operation not in _CONVERSE:
        return orjson.dumps({"input": {"invokeModel": {"body": base64.b64encode(body).decode()}}}), 0
    document = orjson.loads(body)
    counted = {name: document[name] for name in _COUNTED_FIELDS if name in document}
    rest = {name: value for name, value in document.items() if name not in counted and name not in _IGNORED_FIELDS}
    return orjson.dumps({"input": {"converse": counted}}), UNCOUNTED_TOKENS_PER_BYTE * len(
        orjson.dumps(rest)
    ) if rest else 0


class _CountResponder:
    """A responder that keeps the response in memory."""

    is_disconnected = False

    def __init__(self) -> None:
        self.has_started = False
        self._status = 0
        self._body = bytearray()
        self._is_whole = False
        self._flow: FlowControl | None = None

    def attach(self, flow: FlowControl) -> None:
        self._flow = flow

    def abandon(self) -> None:
        """Drain what may still come, within the same limits as for a caller that left."""
        if self._flow is not None:
            self._flow.on_disconnected()

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:  # noqa: ARG002
        self.has_started, self._status = True, status

    def write(self, data: bytes) -> None:
        if len(self._body) <= MAX_RESPONSE_BYTES:
            self._body += data

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        self._is_whole = True

    def abort(self) -> None:
        pass

    def parse_tokens(self) -> int:
        """Raises InvalidRequest, TooManyRequests and UpstreamUnavailable."""
        if not self._is_whole:
            raise UpstreamUnavailable(
                "Bedrock's answer to counting the tokens of this call was incomplete", retry_after=1
            )
        try:
            answer = orjson.loads(self._body)
        except orjson.JSONDecodeError:
            answer = None
        document = answer if isinstance(answer, dict) else {}
        if self._status == THROTTLED:
            raise TooManyRequests("Bedrock throttles the counting of this call's tokens", retry_after=1)
        if self._status >= 500:
            raise UpstreamUnavailable("Bedrock cannot count the tokens of this call now", retry_after=1)
        if self._status != 200:
            reason = str(document.get("message", "no reason is given"))[:300]
            raise InvalidRequest(
                f"a hard budget needs to know how many tokens this call has, and Bedrock does not count them: {reason}"
            )
        tokens = document.get("inputTokens")
        if type(tokens) is not int or tokens < 0:
            raise InvalidRequest(
                "a hard budget needs to know how many tokens this call has, and Bedrock's answer has no number"
            )
        return tokens


class _NullObserver:
    """Observes nothing: counting costs nothing, so there is nothing to record."""

    def on_sent(self, target: UpstreamTarget) -> None: ...

    def on_not_executed(self) -> None: ...

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_end(self, is_whole: bool) -> None: ...
