"""One answer of ConverseStream, frame by frame, as Bedrock writes it; every frame is as long as the others. Pure."""

from __future__ import annotations

import json

from price_keeper.upstream.eventstream import encode_frame

from bench.speed.upstream import QUESTION, REQUEST_ID

FRAMES = 1000  # of one answer
SIZE = 192  # bytes of a frame: with one length for all, who receives can count them without reading them
_PADDING = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"  # what Bedrock's own "p" is made of

HEAD = (
    "HTTP/1.1 200 OK\r\ncontent-type: application/vnd.amazon.eventstream\r\ntransfer-encoding: chunked\r\n"
    f"x-amzn-requestid: {REQUEST_ID}\r\n\r\n"
).encode()
END = b"0\r\n\r\n"

_PLACE = b"What is to be said"  # in the question, where its number goes


def numbered(number: int) -> bytes:
    """The question of one caller, by which Bedrock's side knows whose it is."""
    return QUESTION.replace(_PLACE, f"stream-{number:05d} asks".encode().ljust(len(_PLACE)), 1)


def number_of(question: bytes) -> int:
    at = question.index(b"stream-") + len("stream-")
    return int(question[at : at + 5])


def answer(frames: int = FRAMES) -> list[bytes]:
    tokens = {"inputTokens": 412, "outputTokens": frames - 4, "totalTokens": 412 + frames - 4}
    delta = {"contentBlockIndex": 0, "delta": {"text": " some more words"}}
    return [
        _frame("messageStart", {"role": "assistant"}),
        *[_frame("contentBlockDelta", delta)] * (frames - 4),
        _frame("contentBlockStop", {"contentBlockIndex": 0}),
        _frame("messageStop", {"stopReason": "end_turn"}),
        _frame("metadata", {"metrics": {"latencyMs": 812}, "usage": tokens}, padded=False),
    ]


def _frame(name: str, event: dict[str, object], *, padded: bool = True) -> bytes:
    headers = {":event-type": name, ":content-type": "application/json", ":message-type": "event"}
    bare = json.dumps(event | ({"p": ""} if padded else {}), separators=(",", ":"))
    missing = SIZE - len(encode_frame(headers, bare.encode()))
    if not padded:
        return encode_frame(headers, (bare + " " * missing).encode())
    return encode_frame(headers, bare.replace('"p":""', f'"p":"{(_PADDING * 3)[:missing]}"').encode())


def chunk(frame: bytes) -> bytes:
    return f"{len(frame):x}\r\n".encode() + frame + b"\r\n"


def unchunked(body: bytes) -> bytes:
    """What was sent, of a body that came in chunks."""
    pieces: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        if size == 0:
            return b"".join(pieces)
        pieces.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
