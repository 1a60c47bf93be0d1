"""What an answer of one piece says it used, in every dialect that Bedrock's models speak. Pure.

Each place in an answer that tells of tokens is read into `Counts`, where what is not said stays None. The places are
merged, and what comes of that is a `Usage`. A number that cannot be a count makes the whole of its place say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from price_keeper.metering.counts import NO_COUNTS, ReportedCounts, merge_counts, build_usage, sum_input
from price_keeper.metering.usage import Usage

Json = Mapping[str, Any]

MOST_TOKENS: Final = 10**9  # a hundred times the longest context there is; a count beyond it is a mistake

METRICS: Final = "amazon-bedrock-invocationMetrics"

# What a guardrail counts beside the units it charges for: units that are free, and a number of policies.
NOT_CHARGED: Final = frozenset(("sensitiveInformationPolicyFreeUnits", "automatedReasoningPolicies"))

_INPUT_HEADER: Final = b"x-amzn-bedrock-input-token-count"
_OUTPUT_HEADER: Final = b"x-amzn-bedrock-output-token-count"
_HEADERS: Final = {
    "inputTokenCount": _INPUT_HEADER,
    "outputTokenCount": _OUTPUT_HEADER,
    "cacheReadInputTokenCount": b"x-amzn-bedrock-cache-read-input-token-count",
    "cacheWriteInputTokenCount": b"x-amzn-bedrock-cache-write-input-token-count",
}
TIER_HEADER: Final = b"x-amzn-bedrock-service-tier"
LATENCY_HEADER: Final = b"x-amzn-bedrock-performanceconfig-latency"

# Claude's own word for the tier that Bedrock calls default. "auto" is what a caller asks, not what one gets.
_TIERS: Final = {"standard": "default", "auto": ""}
_LONGEST_NAME: Final = 40
_NOT_PRINTABLE: Final = re.compile(r"[^ -~]")

NO_HEADERS: Final[Mapping[bytes, bytes]] = MappingProxyType({})
EMBEDDINGS: Final = ("embedding", "embeddings", "embeddingsByType")

# Members that tell of an answer and are no part of what the model said.
_ENVELOPE: Final = frozenset(
    ("id", "type", "role", "model", "object", "status", "version", "stop_reason", "stopReason", "stop_sequence",
     "stop_details", "finish_reason", "finishReason", "completionReason", "event_type", "generation_id", "response_id",
     "service_tier", "serviceTier", "performanceConfig", "system_fingerprint", "usage", "meta", "trace", METRICS,
     "amazon-bedrock-guardrailAction", "amazon-bedrock-trace")
)  # fmt: skip

_Reader = Callable[[Json], ReportedCounts]


class _NotACount(Exception):
    """A number that no one can have counted: the place where it stands is not to be trusted."""


# ---------------------------------------------------------------- answers

# Each returns None for an answer that does not state both input and output; without `needs_output` the input is enough.


def converse(document: Json, headers: Mapping[bytes, bytes] = NO_HEADERS, *, needs_output: bool = True) -> Usage | None:
    counts = said_by(_converse, _within(document, "usage"))
    if counts.input is None or (counts.output is None and needs_output):
        return None
    stated = document.get("serviceTier")
    tier = _tier(headers.get(TIER_HEADER)) or _tier(stated.get("type") if isinstance(stated, dict) else stated)
    latency = latency_of(headers) or _name(_within(document, "performanceConfig").get("latency"))
    return build_usage(counts, tier, latency)


def invocation(document: Any, headers: Mapping[bytes, bytes], *, needs_output: bool = True) -> Usage | None:
    """InvokeModel's body and headers together. Only an embedding may lack the count of its output."""
    counts = told(document)
    if None in counts[:4] or _contradict(headers, counts):
        counts = merge_counts(counts, said_by(_metrics, _from_headers(headers)))
    if counts.input is None or (counts.output is None and needs_output and not is_embedding(document)):
        return None
    return build_usage(counts, tier_of(document, headers), latency_of(headers))


def chat(document: Json, headers: Mapping[bytes, bytes] = NO_HEADERS, *, needs_output: bool = True) -> Usage | None:
    counts = said_by(_openai, _within(document, "usage"))
    if counts.input is None or (counts.output is None and needs_output):
        return None
    return build_usage(counts, tier_of(document, headers), latency_of(headers))


def is_embedding(document: Any) -> bool:
    """By its form: a model of vectors has no output tokens to count."""
    return isinstance(document, dict) and any(document.get(name) is not None for name in EMBEDDINGS)


def says_something(document: Any) -> bool:
    """Whether the model said anything, in any family's form: any text outside the envelope."""
    places = [document]
    while places:
        place = places.pop()
        if isinstance(place, dict):
            places += [value for name, value in place.items() if name not in _ENVELOPE]
        elif isinstance(place, list):
            places += place
        elif isinstance(place, str) and place:
            return True
    return False


def guardrail(document: Json) -> Usage | None:
    """Units by policy, under Bedrock's names for them, and also by those it may have tomorrow."""
    units: dict[str, int] = {}
    try:
        for name, value in _within(document, "usage").items():
            if isinstance(value, dict):  # a check's, which stand one level deeper than a policy's
                value = value.get("textUnits")
            if type(value) is int or (value is not None and name.endswith("Units")):
                units[name] = _checked(value)
    except _NotACount:
        return None
    return Usage(units=units) if units else None


# ---------------------------------------------------------------- from places to a usage


def told(document: Any) -> ReportedCounts:
    """What a body of InvokeModel, or a chunk of its stream, says. Its members show whose dialect it is in, more surely
    than the model's family: an imported model speaks that of its kin, and within a family it changed with the years."""
    if isinstance(document, dict):
        for telltale, reader in _DIALECTS:
            if telltale in document:
                counts = said_by(reader, document)
                if counts != NO_COUNTS:
                    return counts
    return NO_COUNTS


def counted_by_bedrock(document: Any) -> ReportedCounts:
    return said_by(_metrics, _within(document, METRICS))


def said_by(reader: _Reader, place: Json) -> ReportedCounts:
    if not isinstance(place, dict):
        return NO_COUNTS
    try:
        return reader(place)
    except _NotACount:
        return NO_COUNTS


def tier_of(document: Any, headers: Mapping[bytes, bytes]) -> str:
    """The header knows more tiers than a body, so what it says goes first."""
    by_header = _tier(headers.get(TIER_HEADER))
    if by_header or not isinstance(document, dict):
        return by_header
    return _tier(document.get("service_tier")) or _tier(_within(document, "usage").get("service_tier"))


def latency_of(headers: Mapping[bytes, bytes]) -> str:
    return _name(headers.get(LATENCY_HEADER))


def _tier(value: Any) -> str:
    name = _name(value)
    return _TIERS.get(name, name)


def _name(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if not isinstance(value, str):
        return ""
    name = value.strip().lower()[:_LONGEST_NAME]
    # No line of a journal can hold half a character. What is left is a name still, and none that has a price.
    return name if name.isascii() and name.isprintable() else _NOT_PRINTABLE.sub("?", name)


def _contradict(headers: Mapping[bytes, bytes], counts: ReportedCounts) -> bool:
    """As text, which is quick: most answers say the same twice."""
    input, output = headers.get(_INPUT_HEADER), headers.get(_OUTPUT_HEADER)
    if input is not None and input != b"%d" % (counts.input or 0):
        return True
    return output is not None and output != b"%d" % (counts.output or 0)


def _from_headers(headers: Mapping[bytes, bytes]) -> dict[str, Any]:
    found = ((name, headers.get(header)) for name, header in _HEADERS.items())
    return {name: _number(value) for name, value in found if value is not None}


def _number(value: bytes) -> int:
    digits = value.strip()
    # A header is short; a million digits would take a while to become a number.
    return int(digits) if digits.isdigit() and len(digits) < _LONGEST_NAME else -1


# ---------------------------------------------------------------- dialects


def _converse(usage: Json) -> ReportedCounts:
    """Nova's own body ends two of the names in Count; Bedrock's often has both."""
    written, for_an_hour = _count(usage, "cacheWriteInputTokens", "cacheWriteInputTokenCount"), None
    details = usage.get("cacheDetails")
    if isinstance(details, list):
        parts = [(part.get("ttl"), _count(part, "inputTokens") or 0) for part in details if isinstance(part, dict)]
        # A lifetime that nobody has heard of is charged as the longest known.
        for_an_hour = sum(tokens for ttl, tokens in parts if ttl != "5m")
        written = max(written or 0, sum(tokens for _, tokens in parts))
    counts = ReportedCounts(
        _count(usage, "inputTokens"),
        _count(usage, "outputTokens"),
        _count(usage, "cacheReadInputTokens", "cacheReadInputTokenCount"),
        written,
        for_an_hour,
    )
    return _checked_total(counts, _count(usage, "totalTokens"))


def _anthropic(usage: Json) -> ReportedCounts:
    """A call that compacted its conversation on the way ran the model more than once. Each run is charged, but the
    counts at the top leave the compaction out, so the runs are added up."""
    runs = [run for run in _list(usage, "iterations") if isinstance(run, dict)]
    if any(run.get("type") == "compaction" for run in runs):
        return _sum([_one_run(run) for run in runs])
    return _one_run(usage)


def _one_run(usage: Json) -> ReportedCounts:
    written, for_an_hour = _count(usage, "cache_creation_input_tokens"), None
    creation = usage.get("cache_creation")
    if isinstance(creation, dict):
        for_an_hour = _count(creation, "ephemeral_1h_input_tokens") or 0
        written = max(written or 0, for_an_hour + (_count(creation, "ephemeral_5m_input_tokens") or 0))
    return ReportedCounts(
        _count(usage, "input_tokens"),
        _count(usage, "output_tokens"),
        _count(usage, "cache_read_input_tokens"),
        written,
        for_an_hour,
    )


def _sum(runs: list[ReportedCounts]) -> ReportedCounts:
    return ReportedCounts(
        _total(run.input for run in runs),
        _total(run.output for run in runs),
        _total(run.cache_read for run in runs),
        _total(run.cache_write for run in runs),
        _total(run.cache_write_1h for run in runs),
    )


def _total(counts: Iterable[int | None]) -> int | None:
    said = [count for count in counts if count is not None]
    return sum(said) if said else None


def _openai(usage: Json) -> ReportedCounts:
    """Here, unlike anywhere else, the prompt's tokens include those of a cache."""
    prompt, details = _count(usage, "prompt_tokens"), _within(usage, "prompt_tokens_details")
    read, written = _count(details, "cached_tokens"), _count(details, "cache_write_tokens")
    cached = (read or 0) + (written or 0)
    if prompt is not None and cached <= prompt:  # more than the prompt has cannot be in it
        prompt -= cached
    counts = ReportedCounts(prompt, _count(usage, "completion_tokens"), read, written)
    return _checked_total(counts, _count(usage, "total_tokens"))


def _checked_total(counts: ReportedCounts, total: int | None) -> ReportedCounts:
    """A total may leave cached tokens out, but more than the sum of all parts contradicts them."""
    whole = sum_input(counts)
    if total is not None and whole is not None and counts.output is not None and total > whole + counts.output:
        raise _NotACount
    return counts


def _metrics(place: Json) -> ReportedCounts:
    return ReportedCounts(
        _count(place, "inputTokenCount"),
        _count(place, "outputTokenCount"),
        _count(place, "cacheReadInputTokenCount"),
        _count(place, "cacheWriteInputTokenCount"),
    )


def _of_usage(document: Json) -> ReportedCounts:
    """Most families have a member `usage`; whose dialect it is in shows in the names."""
    usage = _within(document, "usage")
    if "prompt_tokens" in usage or "completion_tokens" in usage:
        return _openai(usage)
    if "inputTokens" in usage or "outputTokens" in usage:
        return _converse(usage)
    if "billed_units" in usage or "tokens" in usage:
        return _cohere_counts(usage)
    return _anthropic(usage)


def _titan(document: Json) -> ReportedCounts:
    """Text in one piece, text in chunks, or an embedding, which has no output."""
    results = [_count(each, "tokenCount") for each in _list(document, "results") if isinstance(each, dict)]
    if not results:
        results = [_count(document, "totalOutputTextTokenCount")]
    return ReportedCounts(_count(document, "inputTextTokenCount"), _total(results))


def _llama(document: Json) -> ReportedCounts:
    return ReportedCounts(_count(document, "prompt_token_count"), _count(document, "generation_token_count"))


def _cohere(document: Json) -> ReportedCounts:
    return _cohere_counts(_within(document, "meta"))


def _cohere_counts(place: Json) -> ReportedCounts:
    """`tokens` also has those that Cohere wraps around the text; `billed_units` are what it takes money for."""
    billed = _within(place, "billed_units") or _within(place, "tokens")
    return ReportedCounts(_count(billed, "input_tokens"), _count(billed, "output_tokens"))


def _jurassic(document: Json) -> ReportedCounts:
    """AI21's models before Jamba show the tokens themselves."""
    prompt = _list(_within(document, "prompt"), "tokens")
    said = [_list(_within(each, "data"), "tokens") for each in _list(document, "completions")]
    return ReportedCounts(len(prompt), sum(map(len, said))) if prompt else NO_COUNTS


_DIALECTS: tuple[tuple[str, _Reader], ...] = (
    ("usage", _of_usage),
    ("inputTextTokenCount", _titan),
    ("prompt_token_count", _llama),
    ("generation_token_count", _llama),
    ("inputTokenCount", _metrics),  # Nova's embeddings
    ("meta", _cohere),
    ("completions", _jurassic),
)


# ---------------------------------------------------------------- members of JSON


def _within(document: Any, name: str) -> dict[str, Any]:
    value = document.get(name) if isinstance(document, dict) else None
    return value if isinstance(value, dict) else {}


def _list(document: Json, name: str) -> list[Any]:
    value = document.get(name)
    return value if isinstance(value, list) else []


def _count(place: Json, *names: str) -> int | None:
    """The largest under these names. Null is as good as absent: half the families write it so."""
    found: int | None = None
    for name in names:
        value = place.get(name)
        if value is not None:
            found = _checked(value) if found is None else max(found, _checked(value))
    return found


def _checked(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_TOKENS:
        raise _NotACount
    return value
