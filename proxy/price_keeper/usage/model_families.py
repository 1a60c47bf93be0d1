"""Reads token counts from JSON, in the form of every model family that Bedrock serves. Pure.

A family is recognised by the members of its response and not by the model id, because imported models use the form of
the model they derive from. A number that no response can have counted makes its whole place count as not stated.

START HERE for a new family: a row of `ANSWER_FORMS`, whole answers and streams alike, if its answers have none of the
forms that are there; a row of `budgets.hard.request_forms.FAMILIES`, and its name in `config_sections.Format`.

`read_converse`, `read_invocation`, `read_chat` and `read_guardrail` read one complete response, headers included, and
return None if it does not state its usage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from price_keeper.usage.token_usage import NO_COUNTS, ReportedCounts, Usage, build_usage, merge_counts, sum_input

Json = Mapping[str, Any]

MAX_TOKENS: Final = 10**9  # a hundred times the longest context that exists; a larger count is a mistake

INVOCATION_METRICS: Final = "amazon-bedrock-invocationMetrics"

# What a guardrail counts in addition to charged units: units that are free, and a number of policies.
UNBILLED_GUARDRAIL_COUNTS: Final = frozenset(("sensitiveInformationPolicyFreeUnits", "automatedReasoningPolicies"))

_INPUT_HEADER: Final = b"x-amzn-bedrock-input-token-count"
_OUTPUT_HEADER: Final = b"x-amzn-bedrock-output-token-count"
_COUNT_HEADERS: Final = {
    "inputTokenCount": _INPUT_HEADER,
    "outputTokenCount": _OUTPUT_HEADER,
    "cacheReadInputTokenCount": b"x-amzn-bedrock-cache-read-input-token-count",
    "cacheWriteInputTokenCount": b"x-amzn-bedrock-cache-write-input-token-count",
}
TIER_HEADER: Final = b"x-amzn-bedrock-service-tier"
LATENCY_HEADER: Final = b"x-amzn-bedrock-performanceconfig-latency"

# Claude calls Bedrock's default tier "standard". "auto" is what a caller requests, not the tier that it got.
_TIER_ALIASES: Final = {"standard": "default", "auto": ""}
_MAX_NAME_LENGTH: Final = 40
_NOT_PRINTABLE: Final = re.compile(r"[^ -~]")

NO_HEADERS: Final[Mapping[bytes, bytes]] = MappingProxyType({})
EMBEDDING_MEMBERS: Final = ("embedding", "embeddings", "embeddingsByType")

_CountReader = Callable[[Json], ReportedCounts]


class _ImplausibleCount(Exception):
    """A number that cannot be a count, so the place that states it is not trusted."""


# ---------------------------------------------------------------- complete responses

# Each returns None for a response that does not state input and output; without `needs_output` the input is enough.


def read_converse(
    document: Json, headers: Mapping[bytes, bytes] = NO_HEADERS, *, needs_output: bool = True
) -> Usage | None:
    counts = try_read(_read_converse_counts, _object_member(document, "usage"))
    if counts.input is None or (counts.output is None and needs_output):
        return None
    service_tier = document.get("serviceTier")
    tier = normalize_tier(headers.get(TIER_HEADER)) or normalize_tier(
        service_tier.get("type") if isinstance(service_tier, dict) else service_tier
    )
    latency = read_latency(headers) or normalize_name(_object_member(document, "performanceConfig").get("latency"))
    return build_usage(counts, tier, latency)


def read_invocation(document: Any, headers: Mapping[bytes, bytes], *, needs_output: bool = True) -> Usage | None:
    """Read InvokeModel's body and headers together. Only an embedding may lack the count of its output."""
    counts = read_counts(document)
    if None in counts[:4] or _headers_contradict(headers, counts):
        counts = merge_counts(counts, try_read(_read_metrics, _read_count_headers(headers)))
    if counts.input is None or (counts.output is None and needs_output and not is_embedding(document)):
        return None
    return build_usage(counts, read_tier(document, headers), read_latency(headers))


def read_chat(
    document: Json, headers: Mapping[bytes, bytes] = NO_HEADERS, *, needs_output: bool = True
) -> Usage | None:
    counts = try_read(_read_openai, _object_member(document, "usage"))
    if counts.input is None or (counts.output is None and needs_output):
        return None
    return build_usage(counts, read_tier(document, headers), read_latency(headers))


def read_responses(
    document: Json, headers: Mapping[bytes, bytes] = NO_HEADERS, *, needs_output: bool = True
) -> Usage | None:
    """Read one of OpenAI's responses. Cached tokens are part of its input."""
    counts = try_read(_read_openai_response, _object_member(document, "usage"))
    if counts.input is None or (counts.output is None and needs_output):
        return None
    return build_usage(counts, read_tier(document, headers), read_latency(headers))


def is_embedding(document: Any) -> bool:
    """Whether the members are those of an embedding, which has no output tokens to count."""
    return isinstance(document, dict) and any(document.get(name) is not None for name in EMBEDDING_MEMBERS)


def has_output(document: Any) -> bool:
    """Whether the model said anything, in any family's form: whether there is text outside the metadata members."""
    pending = [document]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            pending += [value for name, value in node.items() if name not in _METADATA_MEMBERS]
        elif isinstance(node, list):
            pending += node
        elif isinstance(node, str) and node:
            return True
    return False


def read_guardrail(document: Json) -> Usage | None:
    """Read units by policy, under Bedrock's names for them, including names that it may introduce later."""
    units: dict[str, int] = {}
    try:
        for name, value in _object_member(document, "usage").items():
            if isinstance(value, dict):  # a check's units are one level deeper than a policy's
                value = value.get("textUnits")
            if type(value) is int or (value is not None and name.endswith("Units")):
                units[name] = _check_count(value)
    except _ImplausibleCount:
        return None
    return Usage(units=units) if units else None


# ---------------------------------------------------------------- from members to a usage


def read_counts(document: Any) -> ReportedCounts:
    """Read the counts in a body of InvokeModel, or in a chunk of its stream.

    The members show the form more surely than the model's family does: an imported model uses the form of the model it
    derives from, and within a family the form has changed over the years.
    """
    if isinstance(document, dict):
        for member, reader in _FAMILY_READERS:
            if member in document:
                counts = try_read(reader, document)
                if counts != NO_COUNTS:
                    return counts
    return NO_COUNTS


def read_bedrock_metrics(document: Any) -> ReportedCounts:
    return try_read(_read_metrics, _object_member(document, INVOCATION_METRICS))


def try_read(reader: _CountReader, members: Json) -> ReportedCounts:
    if not isinstance(members, dict):
        return NO_COUNTS
    try:
        return reader(members)
    except _ImplausibleCount:
        return NO_COUNTS


def read_tier(document: Any, headers: Mapping[bytes, bytes]) -> str:
    """Read the service tier. The header has priority, because it knows more tiers than a body."""
    header_tier = normalize_tier(headers.get(TIER_HEADER))
    if header_tier or not isinstance(document, dict):
        return header_tier
    return normalize_tier(document.get("service_tier")) or normalize_tier(
        _object_member(document, "usage").get("service_tier")
    )


def read_latency(headers: Mapping[bytes, bytes]) -> str:
    return normalize_name(headers.get(LATENCY_HEADER))


def normalize_tier(value: Any) -> str:
    name = normalize_name(value)
    return _TIER_ALIASES.get(name, name)


def normalize_name(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if not isinstance(value, str):
        return ""
    name = value.strip().lower()[:_MAX_NAME_LENGTH]
    # A journal line cannot hold half a surrogate pair. The rest still names a tier, though none that has a price.
    return name if name.isascii() and name.isprintable() else _NOT_PRINTABLE.sub("?", name)


def _headers_contradict(headers: Mapping[bytes, bytes], counts: ReportedCounts) -> bool:
    """Whether a header states another count. Compared as text, which is fast: most responses say the same twice."""
    input, output = headers.get(_INPUT_HEADER), headers.get(_OUTPUT_HEADER)
    if input is not None and input != b"%d" % (counts.input or 0):
        return True
    return output is not None and output != b"%d" % (counts.output or 0)


def _read_count_headers(headers: Mapping[bytes, bytes]) -> dict[str, Any]:
    stated = ((name, headers.get(header)) for name, header in _COUNT_HEADERS.items())
    return {name: _parse_count_header(value) for name, value in stated if value is not None}


def _parse_count_header(value: bytes) -> int:
    digits = value.strip()
    # A valid header is short, and a million digits would take long to become a number.
    return int(digits) if digits.isdigit() and len(digits) < _MAX_NAME_LENGTH else -1


# ---------------------------------------------------------------- forms of the families


def _read_converse_counts(usage: Json) -> ReportedCounts:
    """In Nova's own body two of the names end in Count; Bedrock's often has both forms."""
    written, written_1h = _count_member(usage, "cacheWriteInputTokens", "cacheWriteInputTokenCount"), None
    details = usage.get("cacheDetails")
    if isinstance(details, list):
        parts = [
            (part.get("ttl"), _count_member(part, "inputTokens") or 0) for part in details if isinstance(part, dict)
        ]
        # An unknown lifetime is charged as the longest known one.
        written_1h = sum(tokens for ttl, tokens in parts if ttl != "5m")
        written = max(written or 0, sum(tokens for _, tokens in parts))
    counts = ReportedCounts(
        _count_member(usage, "inputTokens"),
        _count_member(usage, "outputTokens"),
        _count_member(usage, "cacheReadInputTokens", "cacheReadInputTokenCount"),
        written,
        written_1h,
    )
    return _check_total(counts, _count_member(usage, "totalTokens"))


def _read_anthropic(usage: Json) -> ReportedCounts:
    """Read Claude's counts.

    A call that compacted its conversation ran the model more than once. Each run is charged, but the top-level counts
    leave the compaction out, so the runs are added up.
    """
    runs = [run for run in _list_member(usage, "iterations") if isinstance(run, dict)]
    if any(run.get("type") == "compaction" for run in runs):
        searches = _read_anthropic_run(usage).web_searches
        return _sum_runs([_read_anthropic_run(run) for run in runs])._replace(web_searches=searches)
    return _read_anthropic_run(usage)


def _read_anthropic_run(usage: Json) -> ReportedCounts:
    written, written_1h = _count_member(usage, "cache_creation_input_tokens"), None
    creation = usage.get("cache_creation")
    if isinstance(creation, dict):
        written_1h = _count_member(creation, "ephemeral_1h_input_tokens") or 0
        written = max(written or 0, written_1h + (_count_member(creation, "ephemeral_5m_input_tokens") or 0))
    return ReportedCounts(
        _count_member(usage, "input_tokens"),
        _count_member(usage, "output_tokens"),
        _count_member(usage, "cache_read_input_tokens"),
        written,
        written_1h,
        _count_member(_object_member(usage, "server_tool_use"), "web_search_requests"),
    )


def _sum_runs(runs: list[ReportedCounts]) -> ReportedCounts:
    return ReportedCounts(
        _sum_stated(run.input for run in runs),
        _sum_stated(run.output for run in runs),
        _sum_stated(run.cache_read for run in runs),
        _sum_stated(run.cache_write for run in runs),
        _sum_stated(run.cache_write_1h for run in runs),
    )


def _sum_stated(counts: Iterable[int | None]) -> int | None:
    stated = [count for count in counts if count is not None]
    return sum(stated) if stated else None


def _read_openai(usage: Json) -> ReportedCounts:
    """Read OpenAI's counts. Unlike in all other families, the prompt's tokens include those of a cache."""
    prompt, details = _count_member(usage, "prompt_tokens"), _object_member(usage, "prompt_tokens_details")
    read, written = _count_member(details, "cached_tokens"), _count_member(details, "cache_write_tokens")
    cached = (read or 0) + (written or 0)
    if prompt is not None and cached <= prompt:  # a larger number cannot be a part of the prompt
        prompt -= cached
    counts = ReportedCounts(prompt, _count_member(usage, "completion_tokens"), read, written)
    return _check_total(counts, _count_member(usage, "total_tokens"))


def _read_openai_response(usage: Json) -> ReportedCounts:
    input = _count_member(usage, "input_tokens")
    cached = _count_member(_object_member(usage, "input_tokens_details"), "cached_tokens")
    if input is not None and cached is not None and cached <= input:  # a larger number cannot be a part of the input
        input -= cached
    counts = ReportedCounts(input, _count_member(usage, "output_tokens"), cached, None)
    return _check_total(counts, _count_member(usage, "total_tokens"))


def _check_total(counts: ReportedCounts, total: int | None) -> ReportedCounts:
    """Check a stated total. It may leave cached tokens out, but more than the sum of all parts contradicts them."""
    total_input = sum_input(counts)
    if (
        total is not None
        and total_input is not None
        and counts.output is not None
        and total > total_input + counts.output
    ):
        raise _ImplausibleCount
    return counts


def _read_metrics(place: Json) -> ReportedCounts:
    return ReportedCounts(
        _count_member(place, "inputTokenCount"),
        _count_member(place, "outputTokenCount"),
        _count_member(place, "cacheReadInputTokenCount"),
        _count_member(place, "cacheWriteInputTokenCount"),
    )


def _read_usage_member(document: Json) -> ReportedCounts:
    """Read the member `usage`, which most families have; the names in it show the form."""
    usage = _object_member(document, "usage")
    for names, reader in _USAGE_READERS:
        if any(name in usage for name in names):
            return reader(usage)
    return _read_anthropic(usage)


def _read_titan(document: Json) -> ReportedCounts:
    """Read Titan: text in one piece, text in chunks, or an embedding, which has no output."""
    results = [
        _count_member(result, "tokenCount") for result in _list_member(document, "results") if isinstance(result, dict)
    ]
    if not results:
        results = [_count_member(document, "totalOutputTextTokenCount")]
    return ReportedCounts(_count_member(document, "inputTextTokenCount"), _sum_stated(results))


def _read_llama(document: Json) -> ReportedCounts:
    return ReportedCounts(
        _count_member(document, "prompt_token_count"), _count_member(document, "generation_token_count")
    )


def _read_cohere(document: Json) -> ReportedCounts:
    return _read_cohere_counts(_object_member(document, "meta"))


def _read_cohere_counts(place: Json) -> ReportedCounts:
    """Read Cohere: `billed_units` are what it charges; `tokens` also has those that it wraps around the text."""
    billed = _object_member(place, "billed_units") or _object_member(place, "tokens")
    return ReportedCounts(_count_member(billed, "input_tokens"), _count_member(billed, "output_tokens"))


def _read_jurassic(document: Json) -> ReportedCounts:
    """Read AI21's models before Jamba, which list the tokens themselves."""
    prompt = _list_member(_object_member(document, "prompt"), "tokens")
    completions = [
        _list_member(_object_member(completion, "data"), "tokens")
        for completion in _list_member(document, "completions")
    ]
    return ReportedCounts(len(prompt), sum(map(len, completions))) if prompt else NO_COUNTS


class AnswerForm(NamedTuple):
    """How answers of InvokeModel state their counts. What is left out, a form does not have."""

    read: _CountReader  # takes the member `usage` if the form is known by `usage_names`, else the document
    telltales: tuple[str, ...] = ()  # members of the document; one of them shows the form
    usage_names: tuple[str, ...] = ()  # or members of its `usage`
    members: tuple[str, ...] = ()  # other members that state usage
    metadata: tuple[str, ...] = ()  # members that are not what the model said
    wrapper: str = ""  # the member of a streamed chunk that has the counts
    chunk_beginning: bytes = b""  # of a chunk with counts; such chunks may be anywhere in a stream
    end_marks: tuple[str, ...] = ()  # members of the chunk after which no output follows


# The first form that an answer shows is read; Claude's has no telltale within `usage`, so it is the one that is left.
ANSWER_FORMS: Final = (
    AnswerForm(
        _read_openai,  # also Mistral, DeepSeek, Jamba, and all that is imported
        usage_names=("prompt_tokens", "completion_tokens"),
        metadata=("object", "finish_reason", "system_fingerprint"),
        end_marks=("finish_reason",),
    ),
    AnswerForm(
        _read_converse_counts,  # Nova
        usage_names=("inputTokens", "outputTokens"),
        metadata=("stopReason",),
        wrapper="metadata",
        chunk_beginning=b'{"metadata":',
    ),
    AnswerForm(
        _read_cohere_counts,
        usage_names=("billed_units", "tokens"),
        metadata=("finishReason", "event_type", "generation_id", "response_id"),
        wrapper="response",
        end_marks=("is_finished",),
    ),
    AnswerForm(
        _read_anthropic,
        metadata=("stop_sequence", "stop_details"),
        wrapper="message",
        chunk_beginning=b'{"type":"message_',
    ),
    AnswerForm(
        _read_titan,
        telltales=("inputTextTokenCount",),
        members=("results", "totalOutputTextTokenCount"),
        metadata=("completionReason",),
        end_marks=("completionReason",),
    ),
    AnswerForm(
        _read_llama,
        telltales=("prompt_token_count", "generation_token_count"),
        metadata=("stop_reason",),
        end_marks=("stop_reason",),
    ),
    AnswerForm(
        _read_metrics,  # Nova's embeddings
        telltales=("inputTokenCount",),
        members=("outputTokenCount", "cacheReadInputTokenCount", "cacheWriteInputTokenCount"),
    ),
    AnswerForm(_read_cohere, telltales=("meta",), metadata=("meta",)),
    AnswerForm(_read_jurassic, telltales=("completions",), members=("prompt",)),
)

_USAGE_READERS = tuple((form.usage_names, form.read) for form in ANSWER_FORMS if form.usage_names)
_FAMILY_READERS: tuple[tuple[str, _CountReader], ...] = (
    ("usage", _read_usage_member),
    *((telltale, form.read) for form in ANSWER_FORMS for telltale in form.telltales),
)
CHUNK_WRAPPERS: Final = tuple(form.wrapper for form in ANSWER_FORMS if form.wrapper)
COUNTING_CHUNK_BEGINNINGS: Final = tuple(form.chunk_beginning for form in ANSWER_FORMS if form.chunk_beginning)
END_MARKS: Final = tuple(mark for form in ANSWER_FORMS for mark in form.end_marks)

# All members that the readers here look at in a complete response. `fast_parse` reduces a response to these, so
# readers see no others.
USAGE_MEMBERS: Final = (
    *dict.fromkeys(member for member, _ in _FAMILY_READERS),
    "service_tier",
    "serviceTier",
    "performanceConfig",
    *(member for form in ANSWER_FORMS for member in form.members),
)

# Members that describe a response and are not part of what the model said.
_METADATA_MEMBERS: Final = frozenset(
    ("id", "type", "role", "model", "status", "version", "service_tier", "serviceTier", "performanceConfig", "usage",
     "trace", INVOCATION_METRICS, "amazon-bedrock-guardrailAction", "amazon-bedrock-trace",
     *(name for form in ANSWER_FORMS for name in form.metadata))
)  # fmt: skip


# ---------------------------------------------------------------- members of JSON


def _object_member(document: Any, name: str) -> dict[str, Any]:
    value = document.get(name) if isinstance(document, dict) else None
    return value if isinstance(value, dict) else {}


def _list_member(document: Json, name: str) -> list[Any]:
    value = document.get(name)
    return value if isinstance(value, list) else []


def _count_member(place: Json, *names: str) -> int | None:
    """Return the largest count under these names. Null counts as absent, because half of the families write it so."""
    largest: int | None = None
    for name in names:
        value = place.get(name)
        if value is not None:
            largest = _check_count(value) if largest is None else max(largest, _check_count(value))
    return largest


def _check_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise _ImplausibleCount
    return value
