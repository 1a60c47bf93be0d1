"""What can befall an exchange on the way to an HTTP/1.1 server, and what chance brings of it. `wire_proxy` does it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

REQUEST_ID = "x-amzn-requestid"


class FaultPoint(Enum):
    """How far an exchange gets before it breaks."""

    REQUEST = "the request is read, and not carried out"
    ANSWER = "the request is carried out, and nothing of its answer comes"
    HEAD = "half of the head comes"
    BODY = "the head comes, and nothing of the body"
    MIDDLE = "the body breaks off in the middle of a chunk"
    END = "all comes but the last chunk, or the last byte where the length is known"


class FaultKind(Enum):
    CLOSE = "a FIN, and nothing is taken any more"
    RESET = "an RST"
    HALF = "a FIN, while everything is still taken"
    STALL = "nothing more, neither bytes nor an end"
    VANISH = "as a machine that lost its power: nothing, and an RST to later requests; Linux, with CAP_NET_ADMIN"


class AtAccept(Enum):
    """What befalls a connection before anything is asked on it."""

    TAKE = "nothing"
    RESET = "it is reset"
    DEAF = "it is never read"


@dataclass(frozen=True)
class Pass:
    """The exchange is left alone."""


@dataclass(frozen=True)
class Break:
    where: FaultPoint = FaultPoint.ANSWER
    how: FaultKind = FaultKind.CLOSE
    seconds: float | None = None  # of HALF and STALL, after which it is reset; None: until the client gives up
    after: int = 0  # so many chunks pass before one breaks in its middle


@dataclass(frozen=True)
class Slow:
    """The answer waits, and then comes in pieces of so many bytes with pauses between them."""

    wait: float = 0.0
    piece: int = 7
    pause: float = 0.0
    most: float = 2.0  # seconds, of all pauses together


@dataclass(frozen=True)
class Twice:
    """The request is delivered twice, the second time `later`. What is seen is the first one's answer; or, when that
    is there, the second's."""

    later: float = 0.0
    shows_second: bool = False


@dataclass(frozen=True)
class Surplus:
    """Behind the answer come these bytes, or the whole answer once more; at once or `later`, perhaps when told to."""

    data: bytes | None = None
    later: float | asyncio.Event = 0.0


@dataclass(frozen=True)
class Answer:
    """The request is not carried out; this is the answer."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True)
class Refuse:
    """The request is not carried out, its connection is reset, and for so many seconds new ones are refused."""

    seconds: float = 0.1


Fault = Pass | Break | Slow | Twice | Surplus | Answer | Refuse


def name_of(fault: Fault) -> str:
    match fault:
        case Break(where, how):
            return f"{how.name.lower()} at {where.name.lower()}"
        case Answer(status, _, _, name):
            return name or f"answer {status}"
        case _:
            return type(fault).__name__.lower()


# ---------------------------------------------------------------- answers that no server gave

# What tells an answer of DynamoDB's from anybody else's. The proxy adds a number, as no two are the same.
DYNAMODB = {REQUEST_ID: "PLANNED", "content-type": "application/x-amz-json-1.0"}


def dynamodb_error(kind: str, status: int = 400, **more: Any) -> Answer:
    body = {"__type": f"com.amazonaws.dynamodb.v20120810#{kind}", "message": "by the script", **more}
    return Answer(status, json.dumps(body).encode(), DYNAMODB, kind)


def bedrock_error(kind: str, status: int) -> Answer:
    headers = {"x-amzn-errortype": kind, REQUEST_ID: "planned"}
    return Answer(status, b'{"message": "by the script"}', headers, kind)


# ---------------------------------------------------------------- what chance brings

DrawFault = Callable[[random.Random], Fault]
_MADE_UP = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
THROTTLES = ("ThrottlingException", "ProvisionedThroughputExceededException", "RequestLimitExceeded")


def _draw_break(how: FaultKind) -> DrawFault:
    places = list(FaultPoint)
    return lambda chance: Break(chance.choice(places), how, chance.uniform(0.05, 0.5), chance.randrange(4))


FAULT_DRAWS: dict[str, DrawFault] = {
    "close": _draw_break(FaultKind.CLOSE),
    "reset": _draw_break(FaultKind.RESET),
    "half": _draw_break(FaultKind.HALF),
    "stall": _draw_break(FaultKind.STALL),
    "slow": lambda chance: Slow(chance.uniform(0, 0.3), chance.randrange(1, 200), chance.uniform(0, 0.02)),
    "twice": lambda chance: Twice(chance.uniform(0, 0.2), chance.random() < 0.5),
    "surplus": lambda chance: Surplus(chance.choice([None, b"x", _MADE_UP])),
    "refuse": lambda chance: Refuse(chance.uniform(0.02, 0.3)),
    "throttled": lambda chance: dynamodb_error(chance.choice(THROTTLES)),
    "in progress": lambda _: dynamodb_error("TransactionInProgressException"),
    "server error": lambda _: dynamodb_error("InternalServerError", 500),
    "Bedrock throttles": lambda _: bedrock_error("ThrottlingException", 429),
    "model not ready": lambda _: bedrock_error("ModelNotReadyException", 429),
    "Bedrock away": lambda _: bedrock_error("ServiceUnavailableException", 503),
}

Rates = Mapping[str, float]  # of the kinds above, as shares of all exchanges

_AT_THE_SOCKET: Rates = {
    "close": 0.02, "reset": 0.02, "half": 0.01, "stall": 0.01, "slow": 0.03, "surplus": 0.01, "refuse": 0.003,
}  # fmt: skip
# A call that is delivered to Bedrock twice is billed twice, undetectably for us. So that fault is for stores alone.
STORE_RATES: Rates = {**_AT_THE_SOCKET, "twice": 0.03, "throttled": 0.03, "in progress": 0.01, "server error": 0.02}
BEDROCK_RATES: Rates = {**_AT_THE_SOCKET, "Bedrock throttles": 0.02, "model not ready": 0.01, "Bedrock away": 0.01}


def draw_fault(seed: object, number: int, rates: Rates) -> Fault:
    """What befalls the exchange of this number: it depends on nothing else."""
    chance = random.Random(f"{seed} {number}")
    point = chance.random()
    for kind, rate in rates.items():
        if point < rate:
            return FAULT_DRAWS[kind](chance)
        point -= rate
    return Pass()
