"""The bodies of each family: what is asked in its own words is answered in them, whole and as a stream."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from bedrock_simulator.aws_errors import AwsError
from bedrock_simulator.fault_spec import parse_fault_spec
from bedrock_simulator.routes import find_route
from bedrock_simulator.service import Service
from bedrock_simulator.simulated_call import SimulatedCall
from botocore.eventstream import EventStreamBuffer
from multidict import CIMultiDict

from tests.support.clock import ManualClock

CHAT = {"messages": [{"role": "user", "content": "hello there"}]}
CLAUDE = {"anthropic_version": "bedrock-2023-05-31", "max_tokens": 9, "messages": CHAT["messages"]}
NOVA = {"messages": [{"role": "user", "content": [{"text": "hello there"}]}], "inferenceConfig": {"maxTokens": 9}}


@dataclass(frozen=True)
class Form:
    """One form of a family: a request for nine tokens, and where its answers keep what is asked about."""

    model: str
    body: dict[str, Any]
    text: tuple[Any, ...]
    stop: tuple[Any, ...]
    stopped: str  # what `stop` says when the maximum cut the answer
    delta: tuple[Any, ...]  # the text in a chunk
    output: tuple[Any, ...] | None  # the count of output tokens in the body, where it has one
    last: tuple[Any, ...] | None = None  # the reason in the chunk that has one; None is the same path as `stop`


CHOICE = ("choices", 0)
COMPLETION = {
    "text": (*CHOICE, "message", "content"),
    "stop": (*CHOICE, "finish_reason"),
    "stopped": "length",
    "delta": (*CHOICE, "delta", "content"),
    "output": ("usage", "completion_tokens"),
}

FORMS = {
    "anthropic": Form(
        "us.anthropic.claude-sonnet-4-5-20250929-v1:0",
        CLAUDE,
        ("content", 0, "text"),
        ("stop_reason",),
        "max_tokens",
        ("delta", "text"),
        ("usage", "output_tokens"),
        ("delta", "stop_reason"),
    ),
    "nova": Form(
        "amazon.nova-lite-v1:0",
        NOVA,
        ("output", "message", "content", 0, "text"),
        ("stopReason",),
        "max_tokens",
        ("contentBlockDelta", "delta", "text"),
        ("usage", "outputTokens"),
        ("messageStop", "stopReason"),
    ),
    "titan": Form(
        "amazon.titan-text-express-v1",
        {"inputText": "hello there", "textGenerationConfig": {"maxTokenCount": 9}},
        ("results", 0, "outputText"),
        ("results", 0, "completionReason"),
        "LENGTH",
        ("outputText",),
        ("results", 0, "tokenCount"),
        ("completionReason",),
    ),
    "llama": Form(
        "meta.llama3-70b-instruct-v1:0",
        {"prompt": "hello there", "max_gen_len": 9},
        ("generation",),
        ("stop_reason",),
        "length",
        ("generation",),
        ("generation_token_count",),
    ),
    "mistral text": Form(
        "mistral.mistral-7b-instruct-v0:2",
        {"prompt": "hello there", "max_tokens": 9},
        ("outputs", 0, "text"),
        ("outputs", 0, "stop_reason"),
        "length",
        ("outputs", 0, "text"),
        None,
    ),
    "mistral chat": Form(
        "mistral.mistral-large-2407-v1:0",
        CHAT | {"max_tokens": 9},
        (*CHOICE, "message", "content"),
        (*CHOICE, "stop_reason"),
        "length",
        (*CHOICE, "message", "content"),
        None,
    ),
    "pixtral": Form("us.mistral.pixtral-large-2502-v1:0", CHAT | {"max_tokens": 9}, **COMPLETION),
    "cohere": Form(
        "cohere.command-r-plus-v1:0",
        {"message": "hello there", "max_tokens": 9},
        ("text",),
        ("finish_reason",),
        "MAX_TOKENS",
        ("text",),
        None,
    ),
    "ai21": Form("ai21.jamba-1-5-large-v1:0", CHAT | {"max_tokens": 9}, **COMPLETION),
    "deepseek r1": Form(
        "us.deepseek.r1-v1:0",
        {"prompt": "hello there", "max_tokens": 9},
        (*CHOICE, "text"),
        (*CHOICE, "stop_reason"),
        "length",
        (*CHOICE, "text"),
        None,
    ),
    "deepseek v3": Form("deepseek.v3-v1:0", CHAT | {"max_tokens": 9}, **COMPLETION),
    "openai": Form("openai.gpt-oss-120b-1:0", CHAT | {"max_completion_tokens": 9}, **COMPLETION),
}

COUNTS = re.compile(r'oken[A-Za-z_]*": ?[0-9]|Token-Count')

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def at(document: Any, path: tuple[Any, ...]) -> Any:
    """What stands at a path, None if the document has no such place."""
    for step in path:
        try:
            document = document[step]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def ask(form: Form, action: str, body: dict[str, Any] | None = None, **wishes: str):
    route = find_route("POST", f"/model/{form.model}/{action}")
    assert route is not None
    raw = json.dumps(form.body if body is None else body).encode()
    return Service(ManualClock(), "us-east-1", 1024).handle(
        SimulatedCall(route, CIMultiDict(), raw, parse_fault_spec(wishes))
    )


def whole(form: Form, **wishes: str) -> dict[str, Any]:
    return dict(json.loads(ask(form, "invoke", **wishes).body))


def chunks(form: Form, **wishes: str) -> list[dict[str, Any]]:
    buffer = EventStreamBuffer()
    buffer.add_data(b"".join(ask(form, "invoke-with-response-stream", **wishes).frames))
    return [json.loads(b64decode(json.loads(frame.payload)["bytes"])) for frame in buffer]


@every_form
def test_response_has_requested_length_and_stop_reason(form):
    answer = whole(form, output_tokens="20")
    assert len(at(answer, form.text).split()) == 9
    assert at(answer, form.stop) == form.stopped
    if form.output:
        assert at(answer, form.output) == 9
    assert at(whole(form, output_tokens="9"), form.stop) != form.stopped


@every_form
def test_stream_has_same_text_and_stop_reason(form):
    brought = chunks(form, output_tokens="20")
    texts = [text for chunk in brought if isinstance(text := at(chunk, form.delta), str)]
    assert "".join(texts) == at(whole(form, output_tokens="20"), form.text)
    assert len([text for text in texts if text]) > 1
    reasons = [reason for chunk in brought if (reason := at(chunk, form.last or form.stop))]
    assert reasons == [form.stopped]


# Where a family takes stop sequences, and what it says when one ended the answer. Llama takes none.
STOPS: dict[str, tuple[tuple[str, ...], str]] = {
    "anthropic": (("stop_sequences",), "stop_sequence"),
    "nova": (("inferenceConfig", "stopSequences"), "stop_sequence"),
    "titan": (("textGenerationConfig", "stopSequences"), "STOP_CRITERIA_MET"),
    "mistral text": (("stop",), "stop"),
    "mistral chat": (("stop",), "stop"),
    "pixtral": (("stop",), "stop"),
    "cohere": (("stop_sequences",), "COMPLETE"),
    "ai21": (("stop",), "stop"),
    "deepseek r1": (("stop",), "stop"),
    "deepseek v3": (("stop",), "stop"),
    "openai": (("stop",), "stop"),
}


@pytest.mark.parametrize("name", STOPS)
def test_stop_sequence_ends_response(name):
    form, (path, reason) = FORMS[name], STOPS[name]
    # Whichever words the changed request brings about, they do not do without both of these letters.
    sequences = {path[-1]: ["e", "a"]}
    body = form.body | (sequences if len(path) == 1 else {path[0]: form.body.get(path[0], {}) | sequences})
    answer = json.loads(ask(form, "invoke", body).body)
    assert not set(at(answer, form.text)) & {"e", "a"}
    assert at(answer, form.stop) == reason


@every_form
def test_only_last_chunk_has_metrics(form):
    *earlier, last = chunks(form, output_tokens="20")
    assert not any("amazon-bedrock-invocationMetrics" in chunk for chunk in earlier)
    usage = ask(form, "invoke", output_tokens="20").usage
    assert (
        last["amazon-bedrock-invocationMetrics"]
        | {
            "inputTokenCount": usage.input_tokens,
            "outputTokenCount": 9,
        }
        == (last["amazon-bedrock-invocationMetrics"])
    )
    assert usage.input_tokens > 0


@every_form
def test_headers_state_counts_whatever_body_states(form):
    answer = ask(form, "invoke", output_tokens="20")
    assert answer.headers["X-Amzn-Bedrock-Input-Token-Count"] == str(answer.usage.input_tokens)
    assert answer.headers["X-Amzn-Bedrock-Output-Token-Count"] == "9"


@every_form
def test_response_without_usage_states_it_nowhere(form):
    answer = ask(form, "invoke", usage="none")
    assert not COUNTS.search(answer.body.decode() + str(answer.headers))
    assert not COUNTS.search(json.dumps(chunks(form, usage="none")))
    assert COUNTS.search(str(ask(form, "invoke").headers))
    assert answer.usage.output_tokens > 0  # it was used all the same


@every_form
def test_incomplete_body_is_refused(form):
    for name in form.body:
        if name in ("messages", "prompt", "message", "inputText"):
            with pytest.raises(AwsError) as refused:
                ask(form, "invoke", {key: value for key, value in form.body.items() if key != name})
            assert refused.value.kind == "ValidationException"


@every_form
@pytest.mark.parametrize("value", [7, "text", [1], {"a": 1}, [[]], [{"role": 5, "content": 7}]])
def test_member_of_wrong_type_never_crashes(form, value):
    for name in form.body:
        with suppress(AwsError):
            ask(form, "invoke", form.body | {name: value})


def test_chat_completion_calls_function():
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    body = CHAT | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    answer = whole(Form("openai.gpt-oss-20b-1:0", body, (), (), "", (), None))
    call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "weather"
    assert set(json.loads(call["arguments"])) == {"city"}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_cohere_repeats_whole_conversation():
    earlier = [{"role": "USER", "message": "before"}]
    answer = whole(Form(FORMS["cohere"].model, FORMS["cohere"].body | {"chat_history": earlier}, (), (), "", (), None))
    asked, answered = answer["chat_history"][1:]
    assert answer["chat_history"][0] == earlier[0]
    assert asked == {"role": "USER", "message": "hello there"}
    assert answered == {"role": "CHATBOT", "message": answer["text"]}


def test_chat_completion_counts_cached_tokens_within_prompt():
    wishes = {"input_tokens": "5", "cache_read_tokens": "7", "cache_write_5m_tokens": "11"}
    usage = whole(FORMS["openai"], **wishes)["usage"]
    assert usage["prompt_tokens"] == 5 + 7 + 11
    assert usage["prompt_tokens_details"] == {"cached_tokens": 7, "cache_write_tokens": 11}


def test_nova_accepts_former_name_of_maximum():
    body = NOVA | {"inferenceConfig": {"max_new_tokens": 4}}
    assert whole(Form(FORMS["nova"].model, body, (), (), "", (), None))["usage"]["outputTokens"] == 4


@pytest.mark.parametrize("model", ["amazon.nova-canvas-v1:0", "amazon.titan-image-generator-v2:0"])
def test_unknown_model_is_refused(model):
    with pytest.raises(AwsError) as refused:
        ask(Form(model, CHAT, (), (), "", (), None), "invoke")
    assert refused.value.kind == "ValidationException"
