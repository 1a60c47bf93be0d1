"""A Bedrock in simulated time, behind the sidecar's own forwarder and relay; and the callers before it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import orjson
from bedrock_simulator import event_frames
from price_keeper.domain import PICO_PER_MICRO, Caller
from price_keeper.exchange import Header, Request
from price_keeper.upstream.connection_pool import CannotConnect, UpstreamEndpoint
from price_keeper.upstream.forwarder import Forwarder

from tests.sim.truth import Truth

# Outcomes of a call at Bedrock. In all but the first two it may have been carried out.
WAYS = ("whole", "throttled", "wrong", "cut", "silent", "slow")
JSON: Header = (b"content-type", b"application/json")
STREAM: Header = (b"content-type", b"application/vnd.amazon.eventstream")
CALLER = b"x-caller"


class Bedrock:
    def __init__(self, chance: random.Random, truth: Truth, prices: dict[str, tuple[int, int]], trace: Any) -> None:
        """`prices` in pico-dollars a token, by model: input and output."""
        self.chance, self.truth, self.prices, self.trace = chance, truth, prices, trace
        self.odds: dict[str, float] = {}
        self.is_down = False
        self.met: Counter[str] = Counter()
        self.answered = 0  # calls, whole

    def way(self) -> str:
        number = self.chance.random()
        for name, odds in self.odds.items():
            number -= odds
            if number < 0:
                self.met[name] += 1
                return name
        return "whole"


class Connection:
    """Carries one call after the other, as one of the real ones does."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.called_at = self.answered_at = self.last_active_at = 0.0
        self.received_bytes = 0
        self.is_written = True
        self.deadline: float | None = None
        self._sink: Any = None

    def call(self, sink: Any, head: bytes, body: bytes) -> None:
        bedrock, loop = self._pool.bedrock, asyncio.get_running_loop()
        self._sink, self.called_at = sink, loop.time()
        chance, way = bedrock.chance, "silent" if bedrock.is_down else bedrock.way()
        first = chance.uniform(0.05, 0.6)
        took = first + chance.choice((0.01, 0.3, 2.0, 15.0 if way == "slow" else 4.0))
        model, is_stream, use = _asked(head)
        most = orjson.loads(body).get("inferenceConfig", {}).get("maxTokens", 4000)
        used = len(body) // 5 + 1, min(most, use)
        bedrock.trace("bedrock", model[:12], way, *used)
        if way == "throttled":
            loop.call_later(first, self._answers, 429, JSON, b'{"message":"too many"}')
        elif way == "wrong":
            loop.call_later(first, self._answers, 400, JSON, b'{"message":"wrong"}')
        elif way == "silent":
            loop.call_later(took, self._breaks)
        elif is_stream:
            self._streams(loop, model, used, first, took, way == "cut")
        else:
            whole = _converse(*used)
            loop.call_later(first, self._starts, JSON)
            if way == "cut":
                loop.call_later(took, self._breaks)
            else:
                loop.call_later(took, self._ends, model, used, whole)

    def _streams(self, loop: Any, model: str, used: tuple[int, int], first: float, took: float, is_cut: bool) -> None:
        loop.call_later(first, self._starts, STREAM)
        loop.call_later(first, self._gives, _SAID)
        loop.call_later((first + took) / 2, self._gives, _SAID)
        if is_cut:
            loop.call_later(took, self._breaks)
        else:
            loop.call_later(took, self._ends, model, used, _metadata(*used))

    def _starts(self, kind: Header) -> None:
        self.answered_at = asyncio.get_running_loop().time()
        if self._sink is not None:
            self._sink.on_head(200, [kind])

    def _gives(self, data: bytes) -> None:
        if self._sink is not None:
            self.received_bytes += len(data)
            self._sink.on_data(data, False)

    def _ends(self, model: str, used: tuple[int, int], data: bytes) -> None:
        if self._sink is None:
            return
        bedrock, prices = self._pool.bedrock, self._pool.bedrock.prices[model]
        bill, truth = used[0] * prices[0] + used[1] * prices[1], bedrock.truth
        before = truth.known_pico
        self._over().on_data(data, True)
        bedrock.answered += 1
        is_written = truth.known_pico - before == bill or self._pool.owes()
        truth.check("what Bedrock told is written down", is_written, model, used)

    def _answers(self, status: int, kind: Header, data: bytes) -> None:
        if self._sink is not None:
            self._sink.on_head(status, [kind])
            self._over().on_data(data, True)

    def _breaks(self) -> None:
        if self._sink is not None:
            self._over(keeps=False).on_broken("cut")

    def _over(self, *, keeps: bool = True) -> Any:
        self.last_active_at = asyncio.get_running_loop().time()
        sink, self._sink = self._sink, None
        if keeps:
            self._pool.standing_by.append(self)
        return sink

    def give_up(self, why: str) -> None:
        if self._sink is not None:
            self._over(keeps=False).on_broken(why)

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None:
        self.give_up("closed")


class Pool:
    def __init__(
        self, endpoint: UpstreamEndpoint, bedrock: Bedrock, owes: Callable[[], bool], standing_by: list[Connection]
    ) -> None:
        """`owes`: the disk would not take all the lines to be written. `standing_by` is shared by all endpoints."""
        self.endpoint, self.bedrock, self.owes = endpoint, bedrock, owes
        self.standing_by = standing_by

    def take_idle(self) -> Connection | None:
        return self.standing_by.pop() if self.standing_by else None

    async def connect(self) -> Connection:
        await asyncio.sleep(self.bedrock.chance.uniform(0.001, 0.05))
        if self.bedrock.is_down and self.bedrock.chance.random() < 0.7:
            raise CannotConnect("refused")
        return Connection(self)

    def release(self, connection: Connection) -> None:
        self.standing_by.append(connection)

    def close(self) -> None: ...

    def check_timeouts(self) -> None: ...


class _Unsigned:
    def build_header_lines(self, *_: Any) -> bytes:
        return b""

    def check(self) -> None: ...

    def on_refused(self) -> None: ...


class SimulatedForwarder(Forwarder):
    """The real one, on connections that are not."""

    def __init__(self, clock: Any, bedrock: Bedrock, owes: Callable[[], bool]) -> None:
        super().__init__(_Unsigned(), clock)
        self._bedrock, self._owes = bedrock, owes
        self._standing_by: list[Connection] = []

    def _pool(self, endpoint: UpstreamEndpoint) -> Any:
        self._hosts[endpoint] = endpoint.host
        pool = self._pools[endpoint] = Pool(endpoint, self._bedrock, self._owes, self._standing_by)
        return pool


class CallOutcome:
    """A caller who waits for an answer, or leaves."""

    def __init__(self) -> None:
        self.status = 0
        self.has_started = self.is_disconnected = self.is_over = self.was_cut = False
        self.flow: Any = None

    def attach(self, flow: Any) -> None:
        self.flow = flow

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        self.has_started, self.status = True, status

    def write(self, data: bytes) -> None: ...

    def flush(self) -> None: ...

    def finish(self) -> None:
        self.is_over = True

    def abort(self) -> None:
        self.was_cut = self.is_over = True

    def leaves(self) -> None:
        if not self.is_over and not self.is_disconnected:
            self.is_disconnected = True
            if self.flow is not None:
                self.flow.on_disconnected()


class ByHeader:
    """Who calls is said in plain."""

    def __init__(self, callers: Sequence[Caller]) -> None:
        self._callers = callers

    def cached(self, request: Request) -> Caller:
        return self._callers[int(request.headers[CALLER])]

    async def load(self, request: Request) -> Caller:
        return self.cached(request)


def request(label: str, caller: int, size: int, most: int | None, use: int, invocation: int | None) -> Request:
    """`use` tokens of output, unless `most` are fewer."""
    is_stream = use % 3 == 0
    target = f"/model/{label}/converse{'-stream' if is_stream else ''}".encode()
    headers = {b"content-type": b"application/json", CALLER: b"%d" % caller, b"user-agent": b"%d" % use}
    if invocation is not None:
        headers[b"amz-sdk-invocation-id"] = b"%d" % invocation
    asked = Request(b"POST", target, headers, frozenset())
    limit = {} if most is None else {"inferenceConfig": {"maxTokens": most}}
    content = [{"role": "user", "content": [{"text": "x" * size}]}]
    asked.body = orjson.dumps({"messages": content, **limit})
    return asked


def prices_of(labels: Any) -> dict[str, tuple[int, int]]:
    found = {}
    for label in labels.values():
        prices = label.prices_usd_per_1m
        found[label.model] = int(prices.input * PICO_PER_MICRO), int(prices.output * PICO_PER_MICRO)
    return found


@lru_cache(100)
def _target(line: bytes) -> tuple[str, bool]:
    path = line.split(b" ")[1].decode().replace("%3A", ":")
    return path.split("/")[2], path.endswith("-stream")


def _asked(head: bytes) -> tuple[str, bool, int]:
    """The caller says by its name how much it wants."""
    return *_target(head.partition(b"\r\n")[0]), int(head.partition(b"user-agent: ")[2].partition(b"\r\n")[0])


def _usage(input: int, output: int) -> dict[str, int]:
    return {"inputTokens": input, "outputTokens": output, "totalTokens": input + output}


def _converse(input: int, output: int) -> bytes:
    said = {"message": {"role": "assistant", "content": [{"text": "so"}]}}
    return orjson.dumps({"output": said, "stopReason": "end_turn", "usage": _usage(input, output)})


_SAID = event_frames.encode_event("messageStart", {"role": "assistant"}) + event_frames.encode_event(
    "contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": "so it is"}}
)


def _metadata(input: int, output: int) -> bytes:
    stop = event_frames.encode_event("messageStop", {"stopReason": "end_turn"})
    return stop + event_frames.encode_event("metadata", {"usage": _usage(input, output), "metrics": {"latencyMs": 5}})
