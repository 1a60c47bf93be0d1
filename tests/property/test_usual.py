"""What is read by its shape is what the readers that know every case read."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from proxy.metering import bodies, usual
from proxy.metering.usage import Usage

COUNTS = st.sampled_from((0, 0, 1, 7, 10**9, 10**9 + 1, -1, 2**70, True, False, None, "7", [], {}))
NAMES = ("inputTokens", "outputTokens", "totalTokens", "cacheReadInputTokens", "cacheReadInputTokenCount",
         "cacheWriteInputTokens", "cacheWriteInputTokenCount", "cacheDetails", "serverToolUsage")  # fmt: skip
USAGES = st.dictionaries(st.sampled_from(NAMES), COUNTS) | st.none() | st.lists(st.integers(), max_size=2)
PLAIN = {"inputTokens": 3, "outputTokens": 4}
DETAILS = [{"ttl": "1h", "inputTokens": 1}]


@given(
    st.builds(lambda usage: {**PLAIN, **usage} if isinstance(usage, dict) else usage, USAGES),
    st.dictionaries(st.sampled_from(("serviceTier", "performanceConfig", "output")), st.just({"type": "flex"})),
)
@example({**PLAIN, "cacheWriteInputTokens": 5, "cacheDetails": DETAILS}, {})
@example({**PLAIN, "cacheReadInputTokens": None, "cacheReadInputTokenCount": 6}, {})
def test_the_quick_reader_of_conversations_says_the_same_or_nothing(usage: Any, more: dict[str, Any]) -> None:
    answer = {"usage": usage, **more}
    found = usual.converse(json.dumps(answer).encode())
    assert found is None or found == bodies.converse(answer)


def test_the_quick_reader_knows_an_answer_as_bedrock_writes_it() -> None:
    usage = {"cacheReadInputTokenCount": 2, "cacheReadInputTokens": 2, "cacheWriteInputTokenCount": 0,
             "cacheWriteInputTokens": 0, "inputTokens": 3, "outputTokens": 4, "serverToolUsage": {}}  # fmt: skip
    answer = {"metrics": {"latencyMs": 1}, "output": {"message": {"content": [{"text": 'é \\ " {'}]}}, "usage": usage}
    assert usual.converse(json.dumps(answer).encode()) == Usage(3, 4, 2)


def test_the_quick_reader_leaves_alone_what_is_no_such_answer() -> None:
    for answer in (
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"usage":' + b"[" * 100_000,
        b'\xff{"usage":{}}',
        b'{"usage":{"inputTokens":1}}',
    ):
        assert usual.converse(answer) is None
