"""What a simulated model says: by a hash, of a known length, within the request's limits."""

from __future__ import annotations

from hashlib import sha256

import pytest
from bedrock_simulator import replies, tokens
from bedrock_simulator.aws_errors import AwsError
from bedrock_simulator.fault_spec import HEALTHY, parse_fault_spec
from bedrock_simulator.generation import MAX_OUTPUT_TOKENS, Prompt, StopReason, check_max_tokens, complete
from bedrock_simulator.usage import Usage, corrupt_usage
from hypothesis import given
from hypothesis import strategies as some

SEED = sha256(b"a request").digest()
seeds = some.binary(min_size=1).map(lambda raw: sha256(raw).digest())


def said(prompt=None, **wishes):
    return complete(
        prompt or Prompt([]), Usage(input_tokens=10), SEED, parse_fault_spec(wishes) if wishes else HEALTHY, 0
    )


@given(seeds, some.integers(0, 10_000))
def test_generated_words_have_requested_token_count(seed, length):
    assert tokens.count_tokens(replies.generate_words(seed, length)) == length


@given(seeds, some.integers(0, 300), some.integers(0, 300))
def test_longer_text_begins_with_shorter(seed, one, other):
    short, long = sorted((one, other))
    assert replies.generate_words(seed, long).startswith(replies.generate_words(seed, short))


@given(some.text(max_size=200), some.integers(1, 9))
def test_pieces_join_to_text(text, size):
    assert "".join(replies.split_text(text, size)) == text
    assert replies.split_text(text, size)


def test_other_seed_gives_other_text():
    assert replies.generate_words(SEED, 20) != replies.generate_words(sha256(b"another").digest(), 20)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("", 0),
        ("four", 1),
        ("fives", 2),
        ({"text": "ü" * 4}, 2),
        ({"type": "image", "source": {"data": "x" * 9999}}, tokens.IMAGE_TOKENS),
        ({"image": {"format": "png"}}, tokens.IMAGE_TOKENS),
        ({"a": 1}, 2),
    ],
)
def test_block_tokens_are_counted(block, expected):
    assert tokens.count_block_tokens(block) == expected


def test_default_length_follows_from_seed_and_ends_turn():
    first, again = said(), said()
    assert first == again
    assert first.stop is StopReason.END
    assert first.usage.output_tokens == tokens.count_tokens(first.text) > 0


def test_maximum_cuts_text_with_length_reason():
    completion = said(Prompt([], max_tokens=7), output_tokens="8")
    assert (completion.stop, completion.usage.output_tokens) == (StopReason.LENGTH, 7)
    assert tokens.count_tokens(completion.text) == 7


def test_requested_length_within_maximum_ends_turn():
    completion = said(Prompt([], max_tokens=7), output_tokens="7")
    assert (completion.stop, completion.usage.output_tokens) == (StopReason.END, 7)


def test_first_stop_sequence_ends_text_and_is_named():
    words = said(output_tokens="20").text.split()
    completion = said(Prompt([], stop_sequences=(words[9], words[5])), output_tokens="20")
    assert completion.stop is StopReason.SEQUENCE
    assert completion.stop_sequence in (words[5], words[9])
    assert words[5] not in completion.text
    assert completion.usage.output_tokens == tokens.count_tokens(completion.text)


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "deep": {"type": "object", "properties": {"yes": {"type": "boolean"}}},
        "list": {"type": "array"},
    },
}


def test_tool_is_called_with_input_of_its_schema():
    completion = said(Prompt([], tool=("weather", SCHEMA)))
    assert completion.stop is StopReason.TOOL
    assert completion.tool is not None
    assert completion.tool.name == "weather"
    given_input = completion.tool.input
    assert set(given_input) == set(SCHEMA["properties"])
    assert isinstance(given_input["city"], str)
    assert isinstance(given_input["days"], int)
    assert given_input["unit"] in ("C", "F")
    assert given_input["deep"] == {"yes": True}
    assert completion.usage.output_tokens > tokens.count_block_tokens(given_input)


def test_maximum_too_small_for_tool_call_gives_cut_text():
    completion = said(Prompt([], max_tokens=5, tool=("weather", SCHEMA)))
    assert (completion.stop, completion.tool) == (StopReason.LENGTH, None)


def test_reported_counts_and_latency_can_be_requested():
    completion = said(input_tokens="1", cache_read_tokens="2", cache_write_1h_tokens="3", latency_ms="4")
    assert completion.usage.total_input_tokens == 1 + 2 + 3
    assert completion.latency_ms == 4


@pytest.mark.parametrize("value", [0, -1, "5", 1.5, True, MAX_OUTPUT_TOKENS + 1])
def test_maximum_out_of_range_is_refused(value):
    with pytest.raises(AwsError):
        check_max_tokens(value, "max_tokens", 10)


def test_missing_maximum_is_default():
    assert check_max_tokens(None, "max_tokens", 10) == 10


def test_usage_adds_up_including_units():
    one = Usage(1, 2, 3, 4, 5, {"a": 1})
    assert one + Usage(10, 20, 30, 40, 50, {"a": 1, "b": 2}) == Usage(11, 22, 33, 44, 55, {"a": 2, "b": 2})
    assert one + Usage(1) == Usage(2, 2, 3, 4, 5, {"a": 1})


def test_usage_none_removes_every_usage_member():
    document = {"usage": {"x": 1}, "results": [{"tokenCount": 3, "outputText": "t"}], "message": {"usage": 1, "id": 2}}
    assert corrupt_usage(document, "none") == {"results": [{"outputText": "t"}], "message": {"id": 2}}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("null", {"inputTokens": None, "outputTokens": None, "details": [{"ttl": "1h", "inputTokens": None}]}),
        ("zero", {"inputTokens": 0, "outputTokens": 0, "details": [{"ttl": "1h", "inputTokens": 0}]}),
        ("negative", {"inputTokens": -8, "outputTokens": -6, "details": [{"ttl": "1h", "inputTokens": -3}]}),
        ("text", {"inputTokens": "many", "outputTokens": "many", "details": [{"ttl": "1h", "inputTokens": "many"}]}),
        ("doubled", {"inputTokens": 14, "outputTokens": 10, "details": [{"ttl": "1h", "inputTokens": 4}]}),
        ("no-output", {"inputTokens": 7, "details": [{"ttl": "1h", "inputTokens": 2}]}),
        ("zero-output", {"inputTokens": 7, "outputTokens": 0, "details": [{"ttl": "1h", "inputTokens": 2}]}),
    ],
)
def test_corrupted_usage_leaves_rest_unchanged(how, expected):
    usage = {"inputTokens": 7, "outputTokens": 5, "details": [{"ttl": "1h", "inputTokens": 2}]}
    assert corrupt_usage({"usage": usage, "text": "x", "n": 3}, how) == {"usage": expected, "text": "x", "n": 3}
