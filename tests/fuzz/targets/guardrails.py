"""Guardrails of calls of models: no call that names one is taken for none; a trace is read alike however it comes."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

from price_keeper.operations import Operation
from price_keeper.upstream.eventstream import encode_frame
from price_keeper.usage.guardrail_usage import CHARACTERS_PER_UNIT, GuardrailUsageReader, estimate_request_units
from price_keeper.usage.model_families import MAX_TOKENS
from price_keeper.usage.usage_reader import build_reader

from tests.fuzz.documents import document
from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader, pieces

CONFIG = "guardrailConfig"
NAMES = (CONFIG, "guardrailIdentifier", "guardrailVersion", "messages", "content", "text", "trace", "guardrail",
         "usage", "amazon-bedrock-trace", "inputAssessment", "outputAssessments", "id", "invocationMetrics",
         "topicPolicyUnits", "contentPolicyUnits", "automatedReasoningPolicies", "wordPolicyUnits", "bytes",
         "source")  # fmt: skip
TEXTS = ("abc", "1", "DRAFT", "text", "word " * 300, "A" * 1200, "", "é" * 1100)
KINDS = (b"application/json", b"text/event-stream", b"application/vnd.amazon.eventstream")
ENCODINGS = ("utf-8", "utf-8", "utf-8", "utf-16", "utf-16-le", "utf-32-be", "utf-8-sig")
POLICIES = ("topicPolicyUnits", "contentPolicyUnits", "wordPolicyUnits")
WORDS = tuple(b'"%b":' % name.encode() for name in NAMES)


def one(data: bytes) -> None:
    reader = Reader(data)
    how, seed = reader.byte(), reader.byte()
    body = document(reader, NAMES, TEXTS)
    if how % 2:
        _asked(body, ENCODINGS[how // 2 % len(ENCODINGS)])
    else:
        _traced(body, seed, wrapped=how // 2)


def _asked(body: bytes, encoding: str) -> None:
    """Parsers of JSON of any width, of the first or the last of two members, find no guardrail that we do not."""
    try:
        body = body.decode().encode(encoding)
        last = json.loads(body)
        first = json.loads(body, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    except (ValueError, RecursionError):
        return
    units = estimate_request_units(Operation.CONVERSE, {}, body)
    for view in (first, last):
        if isinstance(view, dict) and view.get(CONFIG):
            holds(units, f"a guardrail that is not found: {view}")
            holds(units * CHARACTERS_PER_UNIT >= _characters(view.get("messages")), f"{units} units for {view}")


def _characters(value: Any) -> int:
    """Of text, without what is an image or a document."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(each) for name, each in value.items() if name != "bytes")
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _traced(answer: bytes, seed: int, *, wrapped: int) -> None:
    kind = KINDS[wrapped % len(KINDS)]
    sent = _sent(answer, kind, wrapped)
    readings = []
    for parts in ([sent], pieces(sent, seed)):
        guarded = GuardrailUsageReader(build_reader(Operation.CONVERSE, "", kind, {}), kind, 3)
        for part in parts:
            guarded.feed(part)
        readings.append((guarded.reported_and_estimated_units(100)[0], guarded.usage(), guarded.partial_usage()))
    same(readings[1], readings[0], "units in pieces")
    units = readings[0][0]
    holds(all(type(count) is int and count >= 0 for count in units.values()), f"no counts: {units}")
    if kind == KINDS[0]:
        expected = _plainly(answer)
        if expected is not None:
            same({name: units.get(name, 0) for name in POLICIES}, expected, "units")


def _sent(answer: bytes, kind: bytes, wrapped: int) -> bytes:
    if kind == KINDS[1]:
        return b"data: " + answer.replace(b"\n", b" ") + b"\n\ndata: [DONE]\n\n"
    if kind == KINDS[2]:
        name, payload = "metadata", answer
        if wrapped % 2:
            name, payload = "chunk", json.dumps({"bytes": b64encode(answer).decode()}).encode()
        return encode_frame({":message-type": "event", ":event-type": name}, payload)
    return answer


def _plainly(answer: bytes) -> dict[str, int] | None:
    """Added up over all places; None where that is no good JSON, or no good counts."""
    try:
        body = json.loads(answer.decode(), parse_constant=float)
        answer.decode().encode()
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or "\\ud" in answer.decode() or b"invocationMetrics" not in answer:
        return None
    usages = [usage for name in ("trace", "amazon-bedrock-trace") for usage in _usages(body.get(name))]
    if not all(_is_good(usage) for usage in usages):
        return None
    return {name: sum(usage.get(name) or 0 for usage in usages) for name in POLICIES}


def _usages(trace: Any) -> list[dict[str, Any]]:
    place = trace.get("guardrail") if isinstance(trace, dict) else None
    return _metrics(place)


def _metrics(place: Any) -> list[dict[str, Any]]:
    if isinstance(place, list):
        return [found for each in place for found in _metrics(each)]
    if not isinstance(place, dict):
        return []
    own = place.get("invocationMetrics")
    inner = [found for name, each in place.items() if name != "invocationMetrics" for found in _metrics(each)]
    return [own.get("usage"), *inner] if isinstance(own, dict) else inner


def _is_good(usage: Any) -> bool:
    """Not what makes all of a trace say nothing: no units, or a number that is no count."""
    if not isinstance(usage, dict) or not usage:
        return False
    return all(type(count) is int and 0 <= count <= MAX_TOKENS for count in usage.values())
