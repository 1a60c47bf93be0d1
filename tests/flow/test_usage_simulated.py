"""What metering reads from the simulated Bedrock's answers is what its ledger says they used: for each operation and
family, in one piece and as a stream, with cached tokens, tiers and latencies, and when a stream is cut.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from urllib.parse import quote

import aiohttp
import pytest
from bedrock_simulator import SimulatedBedrock
from price_keeper.upstream.eventstream import FrameWatcher
from price_keeper.usage import model_families
from price_keeper.usage.stream_usage import (
    CONVERSE_FRAME_LIMITS,
    INVOCATION_FRAME_LIMITS,
    ChatStream,
    ConverseStream,
    InvocationStream,
)
from price_keeper.usage.token_usage import Usage

from tests.support.simulated import (
    CHAT,
    CHAT_PATH,
    CLAUDE,
    CLAUDE_BODY,
    LONG,
    NOVA,
    TURN,
    post,
    simulated_bedrock,
)

PROMPT = {"prompt": "hello there", "max_tokens": 40}
MESSAGES = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 40}

# A model of each family, as the families' bodies differ by model, and what it is asked.
SPEAKERS = {
    "claude": ("anthropic", CLAUDE, CLAUDE_BODY),
    "nova": ("nova", NOVA, TURN),
    "titan": ("titan", "amazon.titan-text-express-v1", {"inputText": "hello there"}),
    "llama": ("llama", "meta.llama3-70b-instruct-v1:0", {"prompt": "hello there", "max_gen_len": 40}),
    "mistral": ("mistral", "mistral.mistral-7b-instruct-v0:2", PROMPT),
    "mistral chat": ("mistral", "mistral.mistral-large-2407-v1:0", MESSAGES),
    "pixtral": ("mistral", "mistral.pixtral-large-2502-v1:0", MESSAGES),
    "command": ("cohere", "cohere.command-r-v1:0", {"message": "hello there"}),
    "jamba": ("ai21", "ai21.jamba-1-5-large-v1:0", MESSAGES),
    "r1": ("deepseek", "deepseek.r1-v1:0", PROMPT),
    "deepseek v3": ("deepseek", "deepseek.v3-v1:0", MESSAGES),
    "gpt-oss": ("openai", "openai.gpt-oss-120b-1:0", MESSAGES),
}
EMBEDDERS = {
    "titan embed": ("titan", "amazon.titan-embed-text-v2:0", {"inputText": "hello there"}),
    "cohere embed": ("cohere", "cohere.embed-english-v3", {"texts": ["hello"], "input_type": "search_query"}),
}
CACHED = {"cache-read-tokens": 700, "cache-write-5m-tokens": 80}
FOR_AN_HOUR = CACHED | {"cache-write-1h-tokens": 9000}
SERVED = {"tier": "flex", "performance": "optimized"}
WISHES = [{}, {"input-tokens": 5000, "output-tokens": 300}, CACHED, SERVED, CACHED | SERVED]


@pytest.fixture
async def bedrock() -> AsyncIterator[SimulatedBedrock]:
    async with simulated_bedrock(require_auth=False) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def ask(bedrock, http):
    async def asked(path, body, wishes=None):
        """Lower-case headers as the proxy has them, and the bytes of the answer."""
        simulated = {f"X-Simulate-{name}": str(value) for name, value in (wishes or {}).items()}
        status, headers, answer = await post(http, bedrock.url + path, body, **simulated)
        assert status == 200, answer
        return {name.lower().encode(): value.encode() for name, value in headers.items()}, answer

    return asked


def truth(bedrock, wishes=None, *, has_latency=True):
    used, served = bedrock.ledger[-1].usage, wishes or {}
    return Usage(
        used.input_tokens,
        used.output_tokens,
        used.cache_read_tokens,
        used.cache_write_5m_tokens,
        used.cache_write_1h_tokens,
        served.get("tier", ""),
        served.get("performance", "") if has_latency else "",
        used.guardrail_units,
    )


def path_of(model, operation):
    return f"/model/{quote(model, safe='')}/{operation}"


def watched(stream, wanted, answer, size=97):
    watcher = FrameWatcher(wanted)
    for at in range(0, len(answer), size):
        for frame in watcher.feed(answer[at : at + size]):
            stream.add_frame(frame)
    return stream


def fed(answer, size=97):
    stream = ChatStream()
    for at in range(0, len(answer), size):
        stream.feed(answer[at : at + size])
    return stream


# ---------------------------------------------------------------- Converse

CONVERSERS = [model for _, model, _ in SPEAKERS.values()]


@pytest.mark.parametrize("wishes", [*WISHES, FOR_AN_HOUR], ids=str)
@pytest.mark.parametrize("model", CONVERSERS)
async def test_converse_usage_matches_ledger(bedrock, ask, model, wishes):
    _, answer = await ask(path_of(model, "converse"), TURN, wishes)
    assert model_families.read_converse(json.loads(answer)) == truth(bedrock, wishes)
    _, answer = await ask(path_of(model, "converse-stream"), TURN, wishes)
    assert watched(ConverseStream(), CONVERSE_FRAME_LIMITS, answer).usage() == truth(bedrock, wishes)


async def test_cached_converse_usage_matches_ledger(bedrock, ask):
    mark = {"cachePoint": {"type": "default", "ttl": "1h"}}
    marked = {"messages": [{"role": "user", "content": [{"text": LONG}, mark, {"text": "and now?"}]}]}
    for number in range(3):
        _, answer = await ask(path_of(CLAUDE, "converse-stream"), marked)
        usage = watched(ConverseStream(), CONVERSE_FRAME_LIMITS, answer).usage()
        assert usage == truth(bedrock)
        assert (usage.cache_write_1h > 0, usage.cache_read > 0) == (number == 0, number > 0)


# ---------------------------------------------------------------- InvokeModel


@pytest.mark.parametrize("wishes", WISHES, ids=str)
@pytest.mark.parametrize("name", [*SPEAKERS, *EMBEDDERS])
async def test_invoke_usage_matches_ledger(bedrock, ask, name, wishes):
    _, model, body = (SPEAKERS | EMBEDDERS)[name]
    headers, answer = await ask(path_of(model, "invoke"), body, wishes)
    assert model_families.read_invocation(json.loads(answer), headers) == truth(bedrock, wishes)


@pytest.mark.parametrize("wishes", WISHES, ids=str)
@pytest.mark.parametrize("name", SPEAKERS)
async def test_invoke_stream_usage_matches_ledger(bedrock, ask, name, wishes):
    _, model, body = SPEAKERS[name]
    headers, answer = await ask(path_of(model, "invoke-with-response-stream"), body, wishes)
    expected = truth(bedrock, wishes)
    for size in (1, 97, len(answer)):
        stream = watched(InvocationStream(headers), INVOCATION_FRAME_LIMITS, answer, size)
        assert stream.usage() == expected
        assert stream.estimate_output() == expected.output


async def test_claude_cache_lifetimes_match_ledger(bedrock, ask):
    headers, answer = await ask(path_of(CLAUDE, "invoke"), CLAUDE_BODY, FOR_AN_HOUR)
    assert model_families.read_invocation(json.loads(answer), headers) == truth(bedrock)
    headers, answer = await ask(path_of(CLAUDE, "invoke-with-response-stream"), CLAUDE_BODY, FOR_AN_HOUR)
    assert watched(InvocationStream(headers), INVOCATION_FRAME_LIMITS, answer).usage() == truth(bedrock)
    assert truth(bedrock).cache_write_1h == 9000


async def test_last_chunk_repeating_whole_text_is_read(bedrock, ask):
    """Cohere's is larger than what is kept of it."""
    wishes = {"output-tokens": 20_000}
    body = {"message": "hello", "max_tokens": 20_000}
    headers, answer = await ask(path_of("cohere.command-r-v1:0", "invoke-with-response-stream"), body, wishes)
    assert watched(InvocationStream(headers), INVOCATION_FRAME_LIMITS, answer).usage() == truth(bedrock)
    assert truth(bedrock).output == 20_000


@pytest.mark.parametrize("name", [*SPEAKERS, *EMBEDDERS])
async def test_response_without_usage_gives_none(ask, name):
    _, model, body = (SPEAKERS | EMBEDDERS)[name]
    headers, answer = await ask(path_of(model, "invoke"), body, {"usage": "none"})
    assert model_families.read_invocation(json.loads(answer), headers) is None


# ---------------------------------------------------------------- streams that are cut


@pytest.mark.parametrize("name", SPEAKERS)
async def test_stream_cut_before_last_chunk_is_estimated(bedrock, ask, name):
    _, model, body = SPEAKERS[name]
    headers, answer = await ask(path_of(model, "invoke-with-response-stream"), body, CACHED)
    expected, frames = truth(bedrock), FrameWatcher(INVOCATION_FRAME_LIMITS).feed(answer)
    for length in range(len(frames)):
        stream = InvocationStream(headers)
        for frame in frames[:length]:
            stream.add_frame(frame)
        usage, partial = stream.usage(), stream.partial_usage()
        assert usage is None or (usage, length) == (expected, len(frames) - 1)  # Claude's message_delta has said it
        assert partial is None or partial.input == expected.input
        assert 0 <= stream.estimate_output() <= 2 * expected.output + 50
        assert stream.estimate_output() > 0 or length == 0
        if name == "claude" and 0 < length < len(frames) - 1:
            assert partial == Usage(expected.input, 0, 700, 80)


async def test_converse_stream_ending_in_exception_is_estimated(bedrock, ask):
    wishes = {"fault": "exception-frame", "after-frames": 12, "output-tokens": 200}
    _, answer = await ask(path_of(CLAUDE, "converse-stream"), TURN, wishes)
    stream = watched(ConverseStream(), CONVERSE_FRAME_LIMITS, answer)
    assert stream.usage() is None
    assert stream.estimate_output() == pytest.approx(4 * 11, abs=8)  # the simulator has four tokens a frame


# ---------------------------------------------------------------- chat completions and guardrails

CHAT_WISHES = [{}, {"input-tokens": 5000, "output-tokens": 300}, CACHED, {"tier": "priority"}]


@pytest.mark.parametrize("wishes", CHAT_WISHES, ids=str)
async def test_chat_usage_matches_ledger(bedrock, ask, wishes):
    _, answer = await ask(CHAT_PATH, CHAT, wishes)
    assert model_families.read_chat(json.loads(answer)) == truth(bedrock, wishes)
    _, answer = await ask(CHAT_PATH, CHAT | {"stream": True, "stream_options": {"include_usage": True}}, wishes)
    for size in (1, 97, len(answer)):
        assert fed(answer, size).usage() == truth(bedrock, wishes)
    assert fed(answer.replace(b"\n", b"\r\n")).usage() == truth(bedrock, wishes)


async def test_chat_stream_without_usage_is_estimated(bedrock, ask):
    _, answer = await ask(CHAT_PATH, CHAT | {"stream": True, "max_tokens": 200}, {"output-tokens": 200})
    stream = fed(answer)
    assert stream.usage() is stream.partial_usage() is None
    assert stream.estimate_output() == pytest.approx(truth(bedrock).output, rel=0.1)


async def test_guardrail_usage_matches_ledger(bedrock, ask):
    content = [{"text": {"text": "word " * 900}}, {"image": {"format": "png", "source": {"bytes": "aGk="}}}]
    _, answer = await ask("/guardrail/gr1/version/1/apply", {"source": "INPUT", "content": content})
    document = model_families.read_guardrail(json.loads(answer))
    assert document == truth(bedrock)
    assert (document.units["contentPolicyUnits"], document.units["contentPolicyImageUnits"]) == (5, 1)


async def test_guardrail_checks_match_ledger(bedrock, ask):
    body = {
        "messages": [{"role": "user", "content": [{"text": "word " * 900}]}],
        "checks": {"contentFilter": {"categories": [{"category": "HATE"}]}, "sensitiveInformation": {"entities": []}},
    }
    _, answer = await ask("/guardrail-checks/invoke", body)
    assert model_families.read_guardrail(json.loads(answer)) == truth(bedrock)
    assert truth(bedrock).units["contentFilter"] == 5
