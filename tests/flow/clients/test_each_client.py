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
    situations_of,
)
from tests.support.clients import (
    AIOBOTO3,
    BOTO3,
    BOTO3_OLDER,
    CLIENTS,
    JAVASCRIPT,
    JAVASCRIPT_HTTP1,
    LITELLM,
    OPENAI,
    OPENAI_JAVASCRIPT,
    ROOT,
    Client,
)

PAGE = ROOT / "docs" / "clients.md"
UPDATE = "PRICE_KEEPER_UPDATE_DOCS"

# By status and type of AWS's errors; what the sidecar says of them begins with these words.
REFUSALS = {
    BAD_TOKEN: (403, "AccessDeniedException", "the token is not good"),
    EXPIRED_TOKEN: (403, "ExpiredTokenException", "the token has expired"),
    UNKNOWN_LABEL: (400, "ValidationException", "there is no label for 'unknown'; there are broken, closed, cut,"),
    TOO_LARGE: (413, "ValidationException", "a request's body has at most 25000000 bytes"),
    UNREACHABLE: (503, "ServiceUnavailableException", "Bedrock cannot be reached"),
    THROTTLING: (429, "ThrottlingException", "Too many requests"),
    QUOTA: (400, "ServiceQuotaExceededException", "Your request exceeds the service quota"),
}
NEVER_TRIED_AGAIN = (BAD_TOKEN, EXPIRED_TOKEN, UNKNOWN_LABEL, TOO_LARGE, QUOTA, CUT_STREAM)

every_client = pytest.mark.parametrize("client", CLIENTS, ids=str)


@pytest.fixture
def found(client: Client, measured: dict[Client, Future[Measured]]) -> Measured:
    client.require_installed()
    return measured[client].result()


@every_client
def test_client_is_answered_with_each_auth_method(client: Client, found: Measured) -> None:
    for way in client.auth_methods:
        assert [each.error for each in found.answers[way]] == [None] * len(found.answers[way])
        whole = found.answers[way][0].answer
        assert len(whole["text"].split()) == whole["output_tokens"] > 0
        assert whole["input_tokens"] > 0
    assert found.ways == list(client.auth_methods)  # and no other


@pytest.mark.parametrize("client", [client for client in CLIENTS if client.streams], ids=str)
def test_client_stream_matches_whole_response(client: Client, found: Measured) -> None:
    whole, stream = (each.answer for each in found.answers[found.ways[0]])
    assert stream["input_tokens"] == whole["input_tokens"]
    assert len(stream["text"].split()) == stream["output_tokens"] > 0
    if client not in (OPENAI, OPENAI_JAVASCRIPT):  # whose body tells that it asks for a stream: another question
        assert stream == whole


@every_client
@pytest.mark.parametrize("situation", REFUSALS)
def test_client_understands_refusal(client: Client, found: Measured, situation: str) -> None:
    status, kind, words = REFUSALS[situation]
    error = found.troubles[situation].outcome.error
    assert error is not None
    assert (error["code"] or "").partition(":")[0] == kind
    assert words in error["message"].replace("\\", "")
    assert error["status"] in (status, None)  # the command line does not tell it


@pytest.mark.parametrize("client", [BOTO3, BOTO3_OLDER, AIOBOTO3, JAVASCRIPT, JAVASCRIPT_HTTP1], ids=str)
@pytest.mark.parametrize("situation", sorted(REFUSALS.keys() - {EXPIRED_TOKEN}))  # for which no SDK has a class
def test_client_raises_its_error_class_for_refusal(client: Client, found: Measured, situation: str) -> None:
    error = found.troubles[situation].outcome.error
    assert error is not None
    assert error["kind"] == REFUSALS[situation][1]


@pytest.mark.parametrize(
    ("client", "situation"),
    [(client, each) for client in CLIENTS for each in situations_of(client) if each in (CUT_STREAM, CUT_ANSWER)],
    ids=str,
)
def test_client_rejects_truncated_response(client: Client, found: Measured, situation: str) -> None:
    assert found.troubles[situation].outcome.error is not None


@every_client
def test_client_retries_only_where_it_helps(client: Client, found: Measured) -> None:
    tries = {situation: trouble.tries for situation, trouble in found.troubles.items()}
    assert [tries[each] for each in NEVER_TRIED_AGAIN if each in tries and tries[each] != 1] == []
    if client is not LITELLM:  # which leaves it to its caller
        assert tries[UNREACHABLE] > 1
        assert tries[THROTTLING] > 1


@every_client
def test_documentation_states_client_behaviour(client: Client, found: Measured) -> None:
    tries = [str(found.troubles[each].tries) if each in found.troubles else "-" for each in SITUATIONS]
    for cells in ([found.version, f"`{client.redirect}`", ", ".join(found.ways)], tries):
        row = f"| {client} | {' | '.join(cells)} |"
        if os.environ.get(UPDATE):
            _update(client, row)
        assert row in PAGE.read_text().splitlines(), f"with {UPDATE}=1 in the environment, this test writes the row"


def _update(client: Client, row: str) -> None:
    """In the table of the page that has rows of as many cells."""
    old = rf"^\| {re.escape(client.name)} (\|[^|\n]*){{{row.count('|') - 2}}}\|$"
    PAGE.write_text(re.sub(old, row, PAGE.read_text(), flags=re.MULTILINE))


def test_documentation_has_one_row_per_client_in_each_table() -> None:
    tables = re.findall(r"^\| client \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    rows = [[row.split(" | ")[0].strip("| ") for row in table.splitlines()] for table in tables]
    assert rows == [[client.name for client in CLIENTS]] * 2
