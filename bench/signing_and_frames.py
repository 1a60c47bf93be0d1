"""What it costs to sign a request, to watch an event stream, and to take a path apart; beside botocore where it can.

Both sides run in turns in the same process, and the best of the rounds counts: compare the ratios, not machines.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from time import perf_counter
from urllib.parse import quote

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotocoreCredentials
from botocore.eventstream import EventStreamBuffer
from price_keeper.operations import decode_model_id, encode_model_id, parse_path
from price_keeper.upstream.eventstream import FrameWatcher, encode_frame
from price_keeper.upstream.sigv4 import AwsCredentials, Signer

HOST = "bedrock-runtime.us-east-1.amazonaws.com"
MODEL = "anthropic.claude-sonnet-4-5-20250929-v1:0"
ARN = f"arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.{MODEL}"
PATH = f"/model/{quote(MODEL, safe='')}/converse"
AT = 1_795_000_000.0
KEYS = ("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
JSON = [("content-type", "application/json")]
FRAMES = 60

Work = Callable[[], object]


def _microseconds(works: Sequence[Work], rounds: int) -> list[float]:
    """The best round of each, every round being some milliseconds long."""
    best = [float("inf")] * len(works)
    times = [max(1, round(0.01 / _once(work))) for work in works]
    for _ in range(rounds):
        for number, work in enumerate(works):
            begun = perf_counter()
            for _ in range(times[number]):
                work()
            best[number] = min(best[number], (perf_counter() - begun) / times[number] * 1e6)
    return best


def _once(work: Work) -> float:
    work()
    begun = perf_counter()
    work()
    return perf_counter() - begun


def _print(title: str, ours: float, theirs: float | None = None) -> None:
    beside = "" if theirs is None else f"  {theirs:9.2f}  {theirs / ours:6.1f}x"
    print(f"{title:46}  {ours:9.2f}{beside}", flush=True)


# ---------------------------------------------------------------- signing


def _signing(rounds: int) -> None:
    for size in (1_700, 100_000):
        for token in (None, "T" * 900):
            ours, theirs = _microseconds(_signers(bytes(size), token), rounds)
            _print(f"sign {size / 1000:g} kB, {'with a' if token else 'no'} token", ours, theirs)
    more = [*JSON, ("x-amzn-bedrock-guardrailidentifier", "abc"), ("x-amzn-bedrock-guardrailversion", "1")]
    signer, credentials, body = Signer("us-east-1"), AwsCredentials(*KEYS), sha256(b"").hexdigest()
    quick, merged, hashing = _microseconds(
        [
            lambda: signer.sign(credentials, "POST", PATH, "", HOST, JSON, body, AT),
            lambda: signer.sign(credentials, "POST", PATH, "", HOST, more, body, AT),
            lambda: sha256(bytes(1_700)).hexdigest(),
        ],
        rounds,
    )
    _print("  of which without the body's hash", quick)
    _print("  with two headers more to sign", merged)
    _print("  the hash of 1.7 kB", hashing)


def _signers(body: bytes, token: str | None) -> tuple[Work, Work]:
    signer, credentials = Signer("us-east-1"), AwsCredentials(*KEYS, token)
    botocores = SigV4Auth(BotocoreCredentials(*KEYS, token), "bedrock", "us-east-1")

    def ours() -> object:
        return signer.sign(credentials, "POST", PATH, "", HOST, JSON, sha256(body).hexdigest(), AT)

    def theirs() -> object:
        return botocores.add_auth(AWSRequest("POST", f"https://{HOST}{PATH}", dict(JSON), body))

    return ours, theirs


# ---------------------------------------------------------------- frames


def _event(name: str, content: object) -> bytes:
    headers = {":event-type": name, ":content-type": "application/json", ":message-type": "event"}
    return encode_frame(headers, json.dumps(content).encode())


def _conversation() -> list[bytes]:
    """Some 180 bytes a frame, with the padding that Bedrock puts in, and the usage at the end."""
    deltas = [
        {"contentBlockIndex": 0, "delta": {"text": " word" * (turn % 5)}, "p": "abcdefghijklmnop"[: turn % 16]}
        for turn in range(FRAMES - 3)
    ]
    usage = {"inputTokens": 812, "outputTokens": 143, "totalTokens": 955}
    return [
        _event("messageStart", {"role": "assistant", "p": "abcd"}),
        *(_event("contentBlockDelta", delta) for delta in deltas),
        _event("messageStop", {"stopReason": "end_turn", "p": "abcdef"}),
        _event("metadata", {"metrics": {"latencyMs": 1234}, "usage": usage}),
    ]


def _watch(parts: Sequence[bytes]) -> Work:
    def work() -> None:
        watcher = FrameWatcher({"metadata": 64 * 1024})
        found = [frame for part in parts for frame in watcher.feed(part)]
        assert watcher.frames == FRAMES
        assert found[0].name == "metadata"

    return work


def _parse(parts: Sequence[bytes]) -> Work:
    def work() -> None:
        buffer = EventStreamBuffer()
        count = 0
        for part in parts:
            buffer.add_data(part)
            count += sum(1 for _ in buffer)
        assert count == FRAMES

    return work


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _watching(rounds: int) -> None:
    frames = _conversation()
    stream = b"".join(frames)
    for title, parts in [("whole", [stream]), ("frame by frame", frames), ("in 1 kB pieces", _cut(stream, 1024))]:
        _print(f"{FRAMES} frames {title}", *_microseconds([_watch(parts), _parse(parts)], rounds))
    (each,) = _microseconds([_watch(_cut(stream, 1))], rounds)
    _print(f"{FRAMES} frames byte by byte, for each byte", each / len(stream))
    large = _cut(_event("contentBlockDelta", "x" * 10_000_000), 1024)

    def pass_large() -> None:
        watcher = FrameWatcher({"metadata": 64 * 1024})
        for part in large:
            watcher.feed(part)
        assert watcher.frames == 1

    (each,) = _microseconds([pass_large], rounds)
    _print("a frame of 10 MB in 1 kB pieces, for each piece", each / len(large))


# ---------------------------------------------------------------- paths


def _splitting(rounds: int) -> None:
    for title, path in [
        ("label", "/model/premium/converse"),
        ("model", PATH),
        ("ARN", f"/model/{quote(ARN, safe='')}/converse"),
        ("fixed", "/openai/v1/chat/completions"),
    ]:
        target = parse_path(path)
        assert target is not None
        taken_apart, put_together = _microseconds([lambda p=path: parse_path(p), lambda t=target: t.path], rounds)
        _print(f"split a path: {title}", taken_apart)
        _print(f"build a path: {title}", put_together)
    raw = quote(MODEL, safe="")
    decoding, encoding = _microseconds(
        [lambda: decode_model_id.__wrapped__(raw), lambda: encode_model_id.__wrapped__(MODEL)], rounds
    )
    _print("decode a model id not seen before", decoding)
    _print("encode a model id not seen before", encoding)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=20)
    rounds = options.parse_args().rounds
    gc.disable()
    print(f"{'':46}  {'us':>9}  {'botocore':>9}  {'ratio':>7}")
    _signing(rounds)
    _watching(rounds)
    _splitting(rounds)


if __name__ == "__main__":
    main()
