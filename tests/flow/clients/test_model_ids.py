"""A model by its label, its id or its ARN, however the client spells it: the same label, and a signature that holds.

The simulated Bedrock checks every signature with botocore's own signer, over the path as it arrived.
"""

from __future__ import annotations

import http.client
import json
from urllib.parse import quote, urlsplit

import pytest

from tests.support.client_stage import PROFILE, ClientStage
from tests.support.clients import (
    AIOBOTO3,
    ANTHROPIC,
    ANTHROPIC_JAVASCRIPT,
    BOTO3,
    BOTO3_OLDER,
    JAVASCRIPT,
    JAVASCRIPT_HTTP1,
    SESSION,
    CallRound,
    Client,
    ask,
)
from tests.support.simulated import CLAUDE, CLAUDE_BODY, TURN

# What a caller may say, the label it means, and the model that is called.
NAMES = {
    "premium": ("premium", CLAUDE),
    CLAUDE: ("premium", CLAUDE),
    "profile": ("profile", PROFILE),
    PROFILE: ("profile", PROFILE),
}
SPELLINGS = {
    "raw": lambda name: name,
    "encoded": lambda name: quote(name, safe=""),
    "encoded twice": lambda name: quote(quote(name, safe=""), safe=""),
    "colons raw": lambda name: quote(name, safe=":"),
    "slashes raw": lambda name: quote(name, safe="/"),
    "in lower case": lambda name: quote(name, safe="").replace("%3A", "%3a").replace("%2F", "%2f"),
}
OPERATIONS = {
    "converse": TURN,
    "converse-stream": TURN,
    "count-tokens": {"input": {"converse": TURN}},
    "invoke": CLAUDE_BODY,
    "invoke-with-response-stream": CLAUDE_BODY,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_every_spelling_of_model_id_is_accepted(staged: ClientStage, name: str, spelling: str, operation: str) -> None:
    place = urlsplit(staged.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
    headers = {"authorization": f"Bearer {staged.token()}", "content-type": "application/json"}
    path = f"/model/{SPELLINGS[spelling](name)}/{operation}"
    connection.request("POST", path, json.dumps(OPERATIONS[operation]), headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 200, body
    decision = tuple(answer.headers[f"x-price-keeper-{what}"] for what in ("requested", "label", "model"))
    assert decision == (name, *NAMES[name])


@pytest.mark.parametrize(
    "client",
    [BOTO3, BOTO3_OLDER, AIOBOTO3, JAVASCRIPT, JAVASCRIPT_HTTP1, ANTHROPIC, ANTHROPIC_JAVASCRIPT],
    ids=str,
)
def test_every_model_name_in_client_spelling_is_served(staged: ClientStage, client: Client) -> None:
    calls = [ask(name, f"{client} asks", stream=stream) for name in NAMES for stream in (False, True)]
    before = staged.bedrock.ledger()["entries"][-1]["sequence"] if staged.bedrock.ledger()["entries"] else 0
    answers = client.play(CallRound(staged.environ(client, SESSION), calls)).answers()
    assert all(answer["output_tokens"] for answer in answers)
    entries = staged.bedrock.ledger(before)["entries"]
    mine = [entry["model"] for entry in entries if f"{client} asks" in entry["body"]]
    assert mine == [model for _, model in NAMES.values() for _ in range(2)]
