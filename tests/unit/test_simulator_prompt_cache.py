"""Prompt caching: written first, read next, gone after its time; never counted twice."""

from __future__ import annotations

import pytest
from bedrock_simulator.aws_errors import AwsError
from bedrock_simulator.prompt_cache import Piece, PromptCache
from bedrock_simulator.usage import Usage
from hypothesis import given
from hypothesis import strategies as some

LEAST = 100


class Seconds:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds():
    return Seconds()


@pytest.fixture
def cache(seconds):
    return PromptCache(seconds, LEAST)


def pieces(*described: tuple[int, str, str | None]) -> list[Piece]:
    return [Piece(tokens, content, ttl) for tokens, content, ttl in described]


PROMPT = ((150, "system", "5m"), (20, "question", None))


def test_without_a_mark_everything_is_input(cache):
    assert cache.read_and_write("m", pieces((150, "system", None))) == Usage(150)


def test_the_first_call_writes_and_the_second_reads(cache):
    assert cache.read_and_write("m", pieces(*PROMPT)) == Usage(20, cache_write_5m_tokens=150)
    assert cache.read_and_write("m", pieces(*PROMPT)) == Usage(20, cache_read_tokens=150)


def test_another_model_or_another_prefix_reads_nothing(cache):
    cache.read_and_write("m", pieces(*PROMPT))
    assert cache.read_and_write("n", pieces(*PROMPT)).cache_read_tokens == 0
    assert cache.read_and_write("m", pieces((150, "other", "5m"))).cache_read_tokens == 0


@pytest.mark.parametrize(("ttl", "lifetime"), [("5m", 300), ("1h", 3600)])
def test_a_prefix_lives_so_long_after_its_last_use(cache, seconds, ttl, lifetime):
    prompt = pieces((150, "system", ttl))
    cache.read_and_write("m", prompt)
    seconds.now = lifetime - 1
    assert cache.read_and_write("m", prompt).cache_read_tokens == 150
    seconds.now += lifetime - 1
    assert cache.read_and_write("m", prompt).cache_read_tokens == 150
    seconds.now += lifetime
    assert cache.read_and_write("m", prompt).cache_write_tokens == 150


def test_a_short_prefix_is_not_kept(cache):
    for _ in range(2):
        assert cache.read_and_write("m", pieces((LEAST - 1, "system", "5m"))) == Usage(LEAST - 1)


def test_each_part_is_written_for_the_time_of_its_own_mark(cache):
    prompt = pieces((150, "tools", "1h"), (60, "system", "5m"), (7, "question", None))
    assert cache.read_and_write("m", prompt) == Usage(7, 0, 0, cache_write_5m_tokens=60, cache_write_1h_tokens=150)


def test_a_conversation_reads_what_an_earlier_turn_wrote_and_writes_the_rest(cache):
    cache.read_and_write("m", pieces((150, "first", "5m")))
    grown = pieces((150, "first", None), (30, "answer", None), (40, "second", "5m"), (5, "tail", None))
    assert cache.read_and_write("m", grown) == Usage(5, 0, 150, cache_write_5m_tokens=70)


def test_a_prefix_too_far_before_its_mark_is_not_looked_for(cache):
    cache.read_and_write("m", pieces((150, "first", "5m")))
    between = [(1, f"block {number}", None) for number in range(25)]
    usage = cache.read_and_write("m", pieces((150, "first", None), *between, (1, "last", "5m")))
    assert usage.cache_read_tokens == 0


@pytest.mark.parametrize(
    "marks",
    [["5m"] * 5, ["5m", "1h"], ["2h"]],
    ids=["too many", "a longer one after a shorter", "unknown"],
)
def test_marks_that_break_the_rules_are_refused(cache, marks):
    with pytest.raises(AwsError):
        cache.read_and_write("m", pieces(*((150, str(index), ttl) for index, ttl in enumerate(marks))))


def test_the_oldest_prefixes_fall_out(seconds, monkeypatch):
    monkeypatch.setattr("bedrock_simulator.prompt_cache._MAX_PREFIXES", 2)
    cache = PromptCache(seconds, LEAST)
    for content in "abc":
        cache.read_and_write("m", pieces((150, content, "5m")))
    assert cache.read_and_write("m", pieces((150, "c", "5m"))).cache_read_tokens == 150
    assert cache.read_and_write("m", pieces((150, "a", "5m"))).cache_read_tokens == 0


@given(
    some.lists(some.tuples(some.integers(0, 300), some.sampled_from("ab"), some.sampled_from([None, "5m"])), max_size=4)
)
def test_every_token_is_counted_once(described):
    cache = PromptCache(Seconds(), LEAST)
    for _ in range(2):
        usage = cache.read_and_write("m", pieces(*described))
        assert usage.total_input_tokens == sum(tokens for tokens, _, _ in described)
        assert min(usage.input_tokens, usage.cache_read_tokens, usage.cache_write_tokens) >= 0
    assert usage.cache_write_tokens == 0  # the second time, all that could be kept was read
