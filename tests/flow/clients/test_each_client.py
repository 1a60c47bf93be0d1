"""Each client as it is, pointed here by its environment alone: it is answered, and a refusal is what it understands."""

from __future__ import annotations

import os
import re
from concurrent.futures import Future

import pytest

from tests.flow.clients.measuring import (
    BAD_TOKEN,
    CUT_ANSWER,
    CUT_STREAM,
    EXPIRED_TOKEN,
    QUOTA,
    SITUATIONS,
    THROTTLING,
    TOO_LARGE,
    UNKNOWN_LABEL,
    UNREACHABLE,
    Measured,
)
from tests.support.clients import CLIENTS, LITELLM, OPENAI, OPENAI_JAVASCRIPT, ROOT, Client

TABLE = ROOT / "docs" / "clients.md"
UPDATE = "PRICE_KEEPER_UPDATE_DOCS"

# By status and type of AWS's errors; what the sidecar says of them begins with these words.
REFUSALS = {
    BAD_TOKEN: (403, "AccessDeniedException", "the token is not good"),
    EXPIRED_TOKEN: (403, "ExpiredTokenException", "the token has expired"),
    UNKNOWN_LABEL: (400, "ValidationException", "there is no label for 'unknown'; there are closed,"),
    TOO_LARGE: (413, "ValidationException", "a request's body has at most 25000000 bytes"),
    UNREACHABLE: (503, "ServiceUnavailableException", "cannot reach 127.0.0.1"),
    THROTTLING: (429, "ThrottlingException", "Too many requests"),
    QUOTA: (400, "ServiceQuotaExceededException", "Your request exceeds the service quota"),
}
NEVER_TRIED_AGAIN = (BAD_TOKEN, EXPIRED_TOKEN, UNKNOWN_LABEL, TOO_LARGE, QUOTA, CUT_STREAM)

# Node resets an answer that comes while more than 10 MB of its request are still to be sent.
DEAF = pytest.mark.xfail(strict=True, reason="over HTTP/2 the answer comes before the whole body was heard")

every_client = pytest.mark.parametrize("client", CLIENTS, ids=str)


@pytest.fixture
def found(client: Client, measured: dict[Client, Future[Measured]]) -> Measured:
    client.demand()
    return measured[client].result()


@every_client
def test_it_is_answered_in_each_way_to_say_who_calls(client: Client, found: Measured) -> None:
    assert found.ways == list(client.ways)
    for way in found.ways:
        whole = found.answers[way][0].answer
        assert len(whole["text"].split()) == whole["output_tokens"] > 0
        assert whole["input_tokens"] > 0


@every_client
def test_its_stream_says_what_the_whole_answer_says(client: Client, found: Measured) -> None:
    if not client.streams:
        pytest.skip(f"{client} has no operations that stream")
    whole, stream = (each.answer for each in found.answers[found.ways[0]])
    if client in (OPENAI, OPENAI_JAVASCRIPT):  # to which another body is another question
        assert len(stream.pop("text").split()) == stream.pop("output_tokens") > 0
    assert stream.items() <= whole.items()


@every_client
@pytest.mark.parametrize("situation", REFUSALS)
def test_a_refusal_is_an_error_that_it_knows(client: Client, found: Measured, situation: str) -> None:
    status, kind, words = REFUSALS[situation]
    error = found.troubles[situation].outcome.error
    assert error is not None
    assert (error["code"] or "").partition(":")[0] == kind
    assert words in error["message"].replace("\\", "")
    assert error["status"] in (status, None)  # the command line does not tell it


@every_client
@pytest.mark.parametrize("situation", [CUT_STREAM, CUT_ANSWER])
def test_a_cut_answer_is_not_taken_for_a_whole_one(client: Client, found: Measured, situation: str) -> None:
    if situation not in found.troubles:
        pytest.skip(f"{client} has no operations that stream")
    assert found.troubles[situation].outcome.error is not None


@every_client
def test_it_tries_again_where_that_helps_and_only_there(client: Client, found: Measured) -> None:
    tries = {situation: trouble.tries for situation, trouble in found.troubles.items()}
    assert [tries[each] for each in NEVER_TRIED_AGAIN if each in tries and tries[each] != 1] == []
    if client is not LITELLM:  # which leaves it to whoever calls it
        assert tries[UNREACHABLE] > 1
        assert tries[THROTTLING] > 1


@every_client
def test_the_documentation_tells_what_it_does(client: Client, found: Measured) -> None:
    cells = [str(found.troubles[each].tries) if each in found.troubles else "-" for each in SITUATIONS]
    row = f"| {client} | {found.version} | `{client.redirect}` | {', '.join(found.ways)} | {' | '.join(cells)} |"
    if os.environ.get(UPDATE):
        _update(client, row)
    assert row in TABLE.read_text().splitlines(), f"with {UPDATE}=1 in the environment, this test writes the row"


def _update(client: Client, row: str) -> None:
    text = TABLE.read_text()
    TABLE.write_text(re.sub(rf"^\| {re.escape(client.name)} \|.*$", row, text, flags=re.MULTILINE))


def test_the_documentation_has_a_row_for_each_client_and_no_other() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [\d.]+ \|", TABLE.read_text(), re.MULTILINE)
    assert rows == [client.name for client in CLIENTS]
