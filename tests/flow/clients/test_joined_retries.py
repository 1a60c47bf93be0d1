"""A client that gives up waiting and asks again gets the answer to its first call: Bedrock is asked, and paid, once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support.client_stage import SLOW, SLOW_SECONDS, ClientStage, new_marker
from tests.support.clients import (
    AIOBOTO3,
    BOTO3,
    BOTO3_OLDER,
    JAVASCRIPT,
    JAVASCRIPT_HTTP1,
    SESSION,
    CallRound,
    Client,
    ask,
)
from tests.support.counting_proxy import CountingProxies

READ_SECONDS = 1.0
assert READ_SECONDS < SLOW_SECONDS

IMPATIENT: dict[str, dict[str, Any]] = {
    "newest": {"read_timeout": READ_SECONDS},
    "main": {"read_timeout": READ_SECONDS},
    "node": {"requestTimeout": READ_SECONDS * 1000},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("client", [BOTO3, BOTO3_OLDER, AIOBOTO3, JAVASCRIPT, JAVASCRIPT_HTTP1], ids=str)
def test_client_retry_after_timeout_joins_call(
    staged: ClientStage, doors: CountingProxies, client: Client, stream: bool
) -> None:
    marker, door = new_marker(), doors.open_proxy(staged.url)
    calls = [ask(SLOW, marker, stream=stream)]
    impatient = CallRound(staged.environ(client, SESSION, door.url), calls, IMPATIENT[client.lives_in])
    (answer,) = client.play(impatient).answers()
    assert answer["output_tokens"] == len(answer["text"].split())
    entries = [entry for entry in staged.faulty_bedrocks[SLOW].ledger()["entries"] if marker in entry["body"]]
    assert door.requests > 1
    assert len(entries) == 1
    assert entries[0]["is_whole"]


@pytest.mark.parametrize("client", [BOTO3, BOTO3_OLDER, JAVASCRIPT], ids=str)
def test_repeated_question_is_a_new_call(staged: ClientStage, client: Client) -> None:
    marker = new_marker()
    environ = staged.environ(client, SESSION)
    first, second = client.play(CallRound(environ, [ask("premium", marker)] * 2)).answers()
    entries = [entry for entry in staged.bedrock.ledger()["entries"] if marker in entry["body"]]
    assert first == second
    assert len(entries) == 2
    assert Counter(entry["invocation_id"] for entry in entries).most_common(1)[0][1] == 1
