"""Output limits: read where stated, inserted where not, and refused where they cannot be known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from price_keeper.budgets.hard.cost_ceiling import CallPrices, compute_ceiling
from price_keeper.domain import CostCeiling
from price_keeper.errors import InvalidRequest
from price_keeper.operations import Operation
from price_keeper.usage.price_table import build_price_table

from tests.unit.test_price_table import CLAUDE

PRICES = CallPrices([build_price_table(CLAUDE)])
CONVERSE, INVOKE, CHAT = Operation.CONVERSE, Operation.INVOKE, Operation.CHAT_COMPLETIONS
LABEL = 4096

TURN = '"messages":[{"role":"user","content":[{"text":"hi"}]}]'
SAID = '"messages":[{"role":"user","content":"hi"}]'
Asked = tuple[Operation, str, str]


def worst(asked: Asked, label: int | None = LABEL, model: str = "m") -> CostCeiling:
    operation, format, body = asked
    return compute_ceiling(operation, format, body.encode(), {}, PRICES, label, model)


def refusal(asked: Asked, label: int | None = LABEL) -> str:
    with pytest.raises(InvalidRequest) as caught:
        worst(asked, label)
    return caught.value.message


def with_member(asked: Asked, path: str, value: str) -> Asked:
    """The body with a member more, where `path` names it."""
    operation, format, body = asked
    outer, _, inner = path.rpartition(".")
    member = f'"{inner}":{value}' if not outer else f'"{outer}":{{"{inner}":{value}}}'
    return operation, format, body[:-1] + f",{member}}}"


# Where each form says it: the request without, and where it is put in.
FORMS: dict[str, tuple[Asked, str]] = {
    "converse": ((CONVERSE, "anthropic", f"{{{TURN}}}"), "inferenceConfig.maxTokens"),
    "converse stream": ((Operation.CONVERSE_STREAM, "llama", f"{{{TURN}}}"), "inferenceConfig.maxTokens"),
    "claude": ((INVOKE, "anthropic", f'{{"anthropic_version":"x",{SAID}}}'), "max_tokens"),
    "claude stream": ((Operation.INVOKE_STREAM, "anthropic", f"{{{SAID}}}"), "max_tokens"),
    "claude text": ((INVOKE, "anthropic", '{"prompt":"hi"}'), "max_tokens_to_sample"),
    "nova": ((INVOKE, "nova", f"{{{TURN}}}"), "inferenceConfig.maxTokens"),
    "titan": ((INVOKE, "titan", '{"inputText":"hi"}'), "textGenerationConfig.maxTokenCount"),
    "llama": ((INVOKE, "llama", '{"prompt":"hi"}'), "max_gen_len"),
    "mistral": ((INVOKE, "mistral", '{"prompt":"hi"}'), "max_tokens"),
    "mistral chat": ((INVOKE, "mistral", f"{{{SAID}}}"), "max_tokens"),
    "command": ((INVOKE, "cohere", '{"prompt":"hi"}'), "max_tokens"),
    "command r": ((INVOKE, "cohere", '{"message":"hi"}'), "max_tokens"),
    "jamba": ((INVOKE, "ai21", f"{{{SAID}}}"), "max_tokens"),
    "jurassic": ((INVOKE, "ai21", '{"prompt":"hi"}'), "maxTokens"),
    "deepseek": ((INVOKE, "deepseek", '{"prompt":"hi"}'), "max_tokens"),
    "deepseek chat": ((INVOKE, "deepseek", f"{{{SAID}}}"), "max_tokens"),
    "gpt-oss": ((INVOKE, "openai", f"{{{SAID}}}"), "max_completion_tokens"),
    "chat completions": ((CHAT, "nova", f'{{"model":"x",{SAID}}}'), "max_completion_tokens"),
}
EACH = pytest.mark.parametrize(("asked", "path"), FORMS.values(), ids=FORMS)


@EACH
def test_stated_limit_counts_and_body_is_unchanged(asked: Asked, path: str) -> None:
    stated = with_member(asked, path, "77")
    found = worst(stated)
    assert found.output_tokens == 77
    assert found.body == stated[2].encode()


@EACH
def test_missing_limit_is_inserted_and_rest_is_unchanged(asked: Asked, path: str) -> None:
    found = worst(asked)
    assert found.output_tokens == LABEL
    assert found.body.decode() == with_member(asked, path, str(LABEL))[2]


@EACH
def test_null_limit_counts_as_missing(asked: Asked, path: str) -> None:
    found = worst(with_member(asked, path, "null"))
    assert found.output_tokens == LABEL
    assert found.body.decode() == with_member(asked, path, str(LABEL))[2]


@EACH
def test_label_without_max_output_tokens_requires_stated_limit(asked: Asked, path: str) -> None:
    message = refusal(asked, None)
    assert path in message
    assert "max_output_tokens" in message
    assert worst(with_member(asked, path, "1"), None).output_tokens == 1


NO_NUMBERS = ("0", "-1", "1e3", "1.0", "1.5", "true", "false", '"9"', "[9]", "{}", "1000000001",
              "99999999999999999999999999", "1e400", "NaN", "Infinity", "07", "+7", "0x10", "")  # fmt: skip


@EACH
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_limit_must_be_a_positive_integer(asked: Asked, path: str, value: str) -> None:
    refusal(with_member(asked, path, value))


@EACH
def test_duplicate_limit_is_refused_however_escaped(asked: Asked, path: str) -> None:
    outer, _, name = path.rpartition(".")
    for spelt in (name, f"\\u{ord(name[0]):04x}{name[1:]}", f"{name[:-1]}\\u{ord(name[-1]):04X}"):
        for first, second in ((name, spelt), (spelt, name)):
            twice = f'"{first}":5,"{second}":500000'
            member = f'"{outer}":{{{twice}}}' if outer else twice
            assert "more than once" in refusal((*asked[:2], asked[2][:-1] + f",{member}}}"))
    if outer:
        member = f'"{outer}":{{"{name}":5}},"{outer}":{{}}'
        assert "more than once" in refusal((*asked[:2], asked[2][:-1] + f",{member}}}"))


@EACH
def test_escaped_limit_name_is_recognised(asked: Asked, path: str) -> None:
    outer, _, name = path.rpartition(".")
    spelt = f"{outer}.\\u{ord(name[0]):04x}{name[1:]}".lstrip(".")
    assert worst(with_member(asked, spelt, "77")).output_tokens == 77
    found = worst(with_member(asked, spelt, "null"))
    assert json.loads(found.body) == json.loads(with_member(asked, path, str(LABEL))[2])


@EACH
def test_limit_name_in_other_case_is_refused(asked: Asked, path: str) -> None:
    outer, _, name = path.rpartition(".")
    refusal(with_member(asked, f"{outer}.{name.swapcase()}".lstrip("."), "5"))
    refusal(with_member(asked, f"{outer}.{name} ".lstrip("."), "5"))
    refusal(with_member(asked, "best_of", "5"))


@pytest.mark.parametrize("spaced", ["{ }", '{"temperature" : 0.5 }', '{"stopSequences":["\\u00e9}"],"topP":1}', "null"])
def test_rest_of_object_stays_byte_for_byte(spaced: str) -> None:
    asked = f'{{ {TURN} ,\n"inferenceConfig" :{spaced}\t}}'
    found = worst((CONVERSE, "nova", asked)).body.decode()
    before, after = asked.split(spaced)
    assert found.startswith(before)
    assert found.endswith(after)
    inside = found[len(before) : -len(after)]
    if spaced != "null":
        assert inside.startswith(spaced.rstrip("} "))
    assert json.loads(inside) == {**(json.loads(spaced) or {}), "maxTokens": LABEL}


# ---------------------------------------------------------------- more than one, or more than one answer


@pytest.mark.parametrize(
    ("asked", "more", "tokens"),
    [
        ((CHAT, "openai", f'{{"model":"x",{SAID},'), '"max_tokens":70,"n":3', 210),
        ((CHAT, "openai", f'{{"model":"x",{SAID},'), '"max_tokens":70,"max_completion_tokens":90', 90),
        ((CHAT, "openai", f'{{"model":"x",{SAID},'), '"max_tokens":90,"max_completion_tokens":70', 90),
        ((CHAT, "openai", f'{{"model":"x",{SAID},'), '"max_tokens":70,"n":null', 70),
        ((INVOKE, "cohere", '{"prompt":"a",'), '"num_generations":5,"max_tokens":7', 35),
        ((INVOKE, "cohere", '{"prompt":"a",'), '"num_generations":5', 5 * LABEL),
        ((INVOKE, "ai21", '{"prompt":"a",'), '"numResults":16,"maxTokens":2', 32),
        ((INVOKE, "ai21", f"{{{SAID},"), '"n":4,"max_tokens":2', 8),
        ((INVOKE, "mistral", f"{{{SAID},"), '"n":4,"max_tokens":2', 8),
        ((INVOKE, "nova", f"{{{TURN},"), '"inferenceConfig":{"max_new_tokens":7}', 7),
        ((INVOKE, "nova", f"{{{TURN},"), '"inferenceConfig":{"max_new_tokens":7,"maxTokens":8}', 8),
        ((INVOKE, "nova", f"{{{TURN},"), '"inferenceConfig":{"max_new_tokens":9,"maxTokens":8}', 9),
    ],
)
def test_largest_limit_counts_times_number_of_answers(asked: Asked, more: str, tokens: int) -> None:
    assert worst((*asked[:2], asked[2] + more + "}")).output_tokens == tokens


@pytest.mark.parametrize("value", ["0", "-1", "1.0", "true", '"2"', "[]"])
@pytest.mark.parametrize(
    "asked",
    [
        (CHAT, "openai", f'{{"model":"x",{SAID},"max_tokens":1,"n":'),
        (INVOKE, "cohere", '{"prompt":"a","max_tokens":1,"num_generations":'),
        (INVOKE, "ai21", '{"prompt":"a","maxTokens":1,"numResults":'),
    ],
)
def test_number_of_answers_must_be_a_positive_integer(asked: Asked, value: str) -> None:
    refusal((*asked[:2], asked[2] + value + "}"))


def test_null_beside_a_stated_limit_is_filled() -> None:
    """A model that reads the one that is null would have no limit."""
    found = worst((CHAT, "openai", f'{{"model":"x",{SAID},"max_completion_tokens":null,"max_tokens":40}}'))
    assert found.output_tokens == 40
    assert json.loads(found.body)["max_completion_tokens"] == 40


# ---------------------------------------------------------------- thinking, and what overrides


def conversation(additional: Any, maximum: int | None = 1000, format: str = "anthropic") -> Asked:
    config = "" if maximum is None else f'"inferenceConfig":{{"maxTokens":{maximum}}},'
    return CONVERSE, format, f'{{{config}{TURN},"additionalModelRequestFields":{json.dumps(additional)}}}'


@pytest.mark.parametrize(
    ("format", "additional", "tokens"),
    [
        ("anthropic", {"max_tokens": 5000}, 5000),
        ("anthropic", {"max_tokens": 50}, 1000),
        ("anthropic", {"max_tokens_to_sample": 5000}, 5000),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 999}}, 1000),
        ("anthropic", {"thinking": {"type": "adaptive"}}, 1000),
        ("anthropic", None, 1000),
        ("anthropic", {}, 1000),
        ("nova", {"inferenceConfig": {"topK": 20}}, 1000),
        ("nova", {"inferenceConfig": {"maxTokens": 2000, "max_new_tokens": 3000}}, 3000),
        ("nova", {"reasoningConfig": {"type": "disabled"}}, 1000),
        ("llama", {"max_gen_len": 1001}, 1001),
        ("openai", {"max_tokens": 1001, "n": 2, "reasoning_effort": "low"}, 2002),
        ("openai", {"max_completion_tokens": 10, "n": 2}, 2000),
        ("cohere", {"num_generations": 3, "k": 1}, 3000),
        ("ai21", {"n": 3}, 3000),
    ],
)
def test_larger_limit_in_additional_fields_counts(format: str, additional: Any, tokens: int) -> None:
    assert worst(conversation(additional, format=format)).output_tokens == tokens


@pytest.mark.parametrize(
    ("format", "additional"),
    [
        ("anthropic", {"max_tokens": None}),
        ("anthropic", {"max_tokens": 1.5}),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 1000}}),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 10**6}}),
        ("anthropic", {"reasoning_config": {"type": "enabled", "budget_tokens": 1000}}),
        ("anthropic", {"thinking": {"budget_tokens": "1"}}),
        ("anthropic", {"thinking": "enabled"}),
        ("anthropic", {"messages": []}),
        ("anthropic", {"tools": [{"type": "computer_20250124"}]}),
        ("anthropic", {"mcp_servers": []}),
        ("anthropic", {"context_management": {"edits": [{"type": "compact_20260112"}]}}),
        ("anthropic", {"inferenceConfig": {"maxTokens": 5}}),
        ("nova", {"reasoningConfig": {"type": "enabled", "maxReasoningEffort": "high"}}),
        ("nova", {"inferenceConfig": {"reasoningConfig": {"type": "enabled"}}}),
        ("nova", {"inferenceConfig": {"maxTokens": None}}),
        ("nova", {"inferenceConfig": []}),
        ("nova", {"inferenceConfig": 0}),
        ("titan", {"textGenerationConfig": {"maxTokenCount": 9}}),
        ("llama", {"max_tokens": 9}),
        ("cohere", {"documents": []}),
        ("anthropic", []),
        ("anthropic", 0),
        ("anthropic", "x"),
    ],
)
def test_unknown_additional_fields_are_refused(format: str, additional: Any) -> None:
    refusal(conversation(additional, format=format))


def test_thinking_budget_must_fit_into_inserted_limit() -> None:
    thinking = '"thinking":{"type":"enabled","budget_tokens":%d}'
    fitting = (INVOKE, "anthropic", f"{{{SAID},{thinking % (LABEL - 1)}}}")
    assert worst(fitting).output_tokens == LABEL
    for asked in (
        (INVOKE, "anthropic", f"{{{SAID},{thinking % LABEL}}}"),
        (INVOKE, "anthropic", f'{{{SAID},"max_tokens":2000,{thinking % 2000}}}'),
        conversation({"thinking": {"type": "enabled", "budget_tokens": LABEL}}, None),
    ):
        assert "budget_tokens" in refusal(asked)


@pytest.mark.parametrize(
    ("format", "model", "body"),
    [
        ("titan", "amazon.titan-embed-text-v2:0", '{"inputText":"a","dimensions":256,"normalize":true}'),
        ("titan", "arn:aws:bedrock:us-east-1::foundation-model/amazon.titan-embed-text-v1", '{"inputText":"a"}'),
        ("cohere", "cohere.embed-english-v3", '{"texts":["a","b"],"input_type":"search_query"}'),
    ],
)
def test_embeddings_have_no_output_limit(format: str, model: str, body: str) -> None:
    found = worst((INVOKE, format, body), None, model)
    assert found.output_tokens == 0
    assert found.body == body.encode()


@pytest.mark.parametrize("model", ["amazon.titan-text-express-v1", "arn:aws:bedrock:r:1:provisioned-model/embed", ""])
def test_text_model_is_not_treated_as_embedding(model: str) -> None:
    assert worst((INVOKE, "titan", '{"inputText":"a"}'), LABEL, model).output_tokens == LABEL
