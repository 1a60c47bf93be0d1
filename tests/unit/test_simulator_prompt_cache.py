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


def test_prompt_without_cache_point_is_all_input(cache):
    assert cache.read_and_write("m", pieces((150, "system", None))) == Usage(150)


def test_first_call_writes_cache_and_second_reads(cache):
    assert cache.read_and_write("m", pieces(*PROMPT)) == Usage(20, cache_write_5m_tokens=150)
    assert cache.read_and_write("m", pieces(*PROMPT)) == Usage(20, cache_read_tokens=150)


def test_other_model_or_prefix_reads_nothing(cache):
    cache.read_and_write("m", pieces(*PROMPT))
    assert cache.read_and_write("n", pieces(*PROMPT)).cache_read_tokens == 0
    assert cache.read_and_write("m", pieces((150, "other", "5m"))).cache_read_tokens == 0


@pytest.mark.parametrize(("ttl", "lifetime"), [("5m", 300), ("1h", 3600)])
def test_cached_prefix_expires_after_last_use(cache, seconds, ttl, lifetime):
    prompt = pieces((150, "system", ttl))
    cache.read_and_write("m", prompt)
    seconds.now = lifetime - 1
    assert cache.read_and_write("m", prompt).cache_read_tokens == 150
    seconds.now += lifetime - 1
    assert cache.read_and_write("m", prompt).cache_read_tokens == 150
    seconds.now += lifetime
    assert cache.read_and_write("m", prompt).cache_write_tokens == 150


def test_short_prefix_is_not_cached(cache):
    for _ in range(2):
        assert cache.read_and_write("m", pieces((LEAST - 1, "system", "5m"))) == Usage(LEAST - 1)


def test_each_part_is_written_with_ttl_of_its_cache_point(cache):
    prompt = pieces((150, "tools", "1h"), (60, "system", "5m"), (7, "question", None))
    assert cache.read_and_write("m", prompt) == Usage(7, 0, 0, cache_write_5m_tokens=60, cache_write_1h_tokens=150)


def test_grown_conversation_reads_earlier_prefix_and_writes_rest(cache):
    cache.read_and_write("m", pieces((150, "first", "5m")))
    grown = pieces((150, "first", None), (30, "answer", None), (40, "second", "5m"), (5, "tail", None))
    assert cache.read_and_write("m", grown) == Usage(5, 0, 150, cache_write_5m_tokens=70)


def test_prefix_far_before_cache_point_is_not_looked_up(cache):
    cache.read_and_write("m", pieces((150, "first", "5m")))
    between = [(1, f"block {number}", None) for number in range(25)]
    usage = cache.read_and_write("m", pieces((150, "first", None), *between, (1, "last", "5m")))
    assert usage.cache_read_tokens == 0


@pytest.mark.parametrize(
    "marks",
    [["5m"] * 5, ["5m", "1h"], ["2h"]],
    ids=["too many", "a longer one after a shorter", "unknown"],
)
def test_invalid_cache_points_are_refused(cache, marks):
    with pytest.raises(AwsError):
        cache.read_and_write("m", pieces(*((150, str(index), ttl) for index, ttl in enumerate(marks))))


def test_oldest_prefixes_are_evicted(seconds, monkeypatch):
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
