"""Callers' HTTP/1.1: what the data port takes for a request, a strict reading takes for the very same one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from price_keeper.exchange import Request, Responder
from price_keeper.server.server_limits import ServerLimits

from tests.fuzz import strict_http1
from tests.fuzz.in_memory import connection, run
from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader, pieces
from tests.fuzz.strict_http1 import Message, More, NoHttp

WIDE = ServerLimits()
NARROW = ServerLimits(head_bytes=600, body_bytes=300, requests_bytes=4000, pipelined=3)
PREFACE = b"PRI * HTTP/2.0"
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"

WORDS = (b"\r\n\r\n", b"HTTP/1.1", b"HTTP/1.0", b"host: here\r\n", b"content-length: 5\r\n", b"0\r\n\r\n",
         b"5\r\nhello\r\n", b"transfer-encoding: chunked\r\n", b"connection: close\r\n", b"connection: upgrade\r\n",
         b"upgrade: h2c\r\n", b"expect: 100-continue\r\n", b"connection: keep-alive, close\r\n", b"POST /a ",
         b"GET / ", b"HEAD /", b"CONNECT ", b"\r\n ", b"chunked, identity", b";ext=1", b"trailer: x\r\n",
         b"keep-alive")  # fmt: skip


@dataclass
class Talk:
    taken: list[Request] = field(default_factory=list)
    said: bytes = b""
    is_over: bool = False

    def answers(self, request: Request, responder: Responder) -> None:
        self.taken.append(request)
        responder.start(200, ((b"x", b"y"),), len(request.body))
        responder.write(request.body)
        responder.finish()


async def _talk(parts: list[bytes], limits: ServerLimits) -> Talk:
    talk = Talk()
    async with connection(talk.answers, limits) as wire:
        await wire.hear(*parts)
        await wire.settle()
        talk.said = wire.written
        talk.is_over = wire.is_closed or getattr(wire.protocol, "_is_input_ignored", False)
    return talk


def one(data: bytes) -> None:
    reader = Reader(data)
    is_wide, seed, sent = reader.byte() % 4 > 0, reader.byte(), reader.rest()
    if sent.startswith(PREFACE):
        return  # that is `http2`'s
    limits = WIDE if is_wide else NARROW
    whole, split = run(_talk([sent], limits)), run(_talk(pieces(sent, seed), limits))
    expected = _expected(sent)
    for talk in (whole, split):
        _same(talk, expected)
        answers = _answers(talk)
        if len(talk.taken) < len(expected):
            holds(talk.is_over, f"it waits, with a whole request there: {expected[len(talk.taken)]}")
        if not talk.is_over:
            same(len(answers), len(talk.taken), "answers")
    if is_wide and all(map(_has_plain_framing, expected)):
        same([_summary(each) for each in split.taken], [_summary(each) for each in whole.taken], "requests in pieces")
        same((split.said, split.is_over), (whole.said, whole.is_over), "answers to pieces")


FRAMING = (b"connection", b"content-length", b"proxy-connection", b"transfer-encoding", b"upgrade")


def _has_plain_framing(message: Message) -> bool:
    """What llhttp reads alike in one piece and in several: no unknown option of a connection, no "upgrade" without its
    header, and no header whose name only begins like one of these. Otherwise the connection may end after its answer.
    """
    others = {name for name, _ in message.headers} - {*FRAMING, b"content-type"}
    is_alike = any(name[:5] == each[:5] for name in others for each in FRAMING)
    options = {option.strip().lower() for value in message.all(b"connection") for option in value.split(b",")}
    named = {b"upgrade", b"http2-settings"} if message.all(b"upgrade") else set()
    return not is_alike and options <= {b"close", b"keep-alive", b"te", b"", *named}


def _expected(sent: bytes) -> list[Message]:
    found: list[Message] = []
    at = 0
    with suppress(NoHttp, More):
        while not (found and found[-1].is_last):
            message, at = strict_http1.request(sent, at)
            found.append(message)
    return found


def _summary(request: Request) -> tuple[object, ...]:
    return request.method, request.target, request.headers, request.repeated, request.body


def _same(talk: Talk, expected: list[Message]) -> None:
    """The requests that were taken are the first of those that a strict reader sees."""
    holds(
        len(talk.taken) <= len(expected),
        f"taken, and none to a strict reader: {[_summary(each) for each in talk.taken[-1:]]}",
    )
    for taken, message in zip(talk.taken, expected, strict=False):
        same((taken.method, taken.target), message.first[:2], "the first line")
        same(taken.body, message.body, "the body")
        names = [name for name, _ in message.headers]
        first = {name: message.all(name)[0] for name in names}
        repeated = frozenset(name for name in names if names.count(name) > 1)
        if b"upgrade" in first:  # a request that offers to upgrade is read again, without what offers it
            for name in (b"connection", b"upgrade", b"http2-settings"):
                first.pop(name, None)
                taken.headers.pop(name, None)
            repeated -= {b"connection", b"upgrade", b"http2-settings"}
            taken.repeated -= {b"connection", b"upgrade", b"http2-settings"}
        same(taken.headers, first, "the headers")
        same(taken.repeated, repeated, "those that come more than once")


def _answers(talk: Talk) -> list[Message]:
    """What was said is whole answers: an echo for each request, in order, and at most one refusal behind them."""
    found: list[Message] = []
    at = 0
    said = talk.said
    while at < len(said) and said[at:] != GO_ON:
        number = len(found)
        to_head = number < len(talk.taken) and talk.taken[number].method == b"HEAD"
        message, at = strict_http1.answer(said, at, is_over=False, to_head=to_head)
        found.append(message)
    for number, message in enumerate(found):
        if number < len(talk.taken):
            asked = talk.taken[number]
            body = b"" if asked.method == b"HEAD" else asked.body
            same((message.first[0], message.body), (b"200", body), "the echo")
        else:
            same(number, len(talk.taken), "answers without a request")
            holds(message.first[0] in (b"400", b"413", b"503") and message.is_last, f"a refusal: {message}")
    holds(len(found) >= len(talk.taken), "a request without an answer")
    return found
