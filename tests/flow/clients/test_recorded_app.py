"""An app as it calls Bedrock without us, by profile ids and ARNs alone: it is pointed here, and nothing in it changes.

`recorded_app.json` has its calls. The stage's configuration knows one model of it by a line with `aliases`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_stage import OLDER_CLAUDE, ClientStage
from tests.support.clients import BOTO3, BOTO3_OLDER, LANGCHAIN, LLAMAINDEX, SESSION, CallRound, Client, ClientCall, ask
from tests.support.simulated import CLAUDE, CLAUDE_BODY, NOVA, TURN

RECORDED: list[list[str]] = json.loads((Path(__file__).parent / "recorded_app.json").read_text())
CLAUDE_PROFILE = f"arn:aws:bedrock:us-east-1:123456789012:inference-profile/{CLAUDE}"
ARGUMENTS: dict[str, dict[str, Any]] = {
    "converse": TURN,
    "converse_stream": TURN,
    "count_tokens": {"input": {"converse": TURN}},
    "invoke_model": {"body": json.dumps(CLAUDE_BODY)},
    "invoke_model_with_response_stream": {"body": json.dumps(CLAUDE_BODY)},
}


@pytest.mark.parametrize("client", [BOTO3, BOTO3_OLDER], ids=str)
def test_recorded_app_works_with_one_line_of_aliases(staged: ClientStage, client: Client) -> None:
    profile = staged.bedrock.create_profile(CLAUDE_PROFILE)
    names = [profile if model == "APPLICATION-PROFILE" else model for _, model in RECORDED]
    calls = [
        ClientCall(operation, {"modelId": name, **ARGUMENTS[operation]})
        for (operation, _), name in zip(RECORDED, names, strict=True)
    ]
    before = max((entry["sequence"] for entry in staged.bedrock.ledger()["entries"]), default=0)
    answers = client.play(CallRound(staged.environ(client, SESSION), calls)).answers()
    wanted = [NOVA if NOVA in name else CLAUDE for name in names]
    for answer, name, model in zip(answers, names, wanted, strict=True):
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        label = "economy" if model == NOVA else "premium"
        found = [headers[f"x-price-keeper-{what}"] for what in ("requested", "label", "model")]
        assert found == [name, label, model]
    entries = staged.bedrock.ledger(before)["entries"]
    assert [entry["model"] for entry in entries if entry["model"]] == wanted
    assert OLDER_CLAUDE in names[-2]


def test_llamaindex_works_with_id_that_it_knows(staged: ClientStage) -> None:
    environ = staged.environ(LLAMAINDEX, SESSION)
    known = (CLAUDE, CLAUDE.removeprefix("global."), "us." + CLAUDE.removeprefix("global."), NOVA, OLDER_CLAUDE)
    calls = [ask(model, stream=stream) for model in known for stream in (False, True)]
    answers = LLAMAINDEX.play(CallRound(environ, calls)).answers()
    assert all(answer["text"] for answer in answers)
    (error,) = LLAMAINDEX.play(CallRound(environ, [ask("premium")])).errors()
    assert "Unknown model: premium" in error["message"]  # why labels are of no use to it


@pytest.mark.parametrize(
    "model",
    [
        {"model": CLAUDE},
        {"model": f"us.{CLAUDE.removeprefix('global.')}"},
        {"model": "premium", "provider": "anthropic", "base_model": CLAUDE},
    ],
    ids=["id", "another form of it", "label with its model"],
)
def test_langchain_forces_tools_of_model_that_it_knows(staged: ClientStage, model: dict[str, str]) -> None:
    calls = [ClientCall(operation, {"model": model, "text": "hello"}) for operation in ("tool", "structured")]
    (called, structured) = LANGCHAIN.play(CallRound(staged.environ(LANGCHAIN, SESSION), calls)).answers()
    assert [call["name"] for call in called] == ["Weather"]
    assert isinstance(structured["city"], str)


def test_langchain_refuses_to_force_tools_of_bare_label(staged: ClientStage) -> None:
    """Before any call: why the documentation names the model beside the label."""
    model = {"model": "premium", "provider": "anthropic"}
    calls = [ClientCall("tool", {"model": model, "text": "hello"})]
    (error,) = LANGCHAIN.play(CallRound(staged.environ(LANGCHAIN, SESSION), calls)).errors()
    assert (error["kind"], "tool_choice" in error["message"]) == ("ValueError", True)
