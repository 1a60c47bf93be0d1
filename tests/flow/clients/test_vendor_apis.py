"""OpenAI's and Anthropic's own SDKs, with nothing but an address and a token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.client_stage import ClientStage
from tests.support.clients import BEARER, CallRound, Client, ClientCall, ClientOutcome

VENDORS = Client("plain openai and anthropic", "vendor_api_calls.py", "", (BEARER,), "newest")


def play(staged: ClientStage, *calls: tuple[str, str], **settings: Any) -> list[ClientOutcome]:
    settings = {"url": staged.url, "token": staged.token()} | settings
    asked = [ClientCall(operation, {"model": model}) for operation, model in calls]
    return VENDORS.play(CallRound({}, asked, settings)).rounds[0]


def answers(staged: ClientStage, *calls: tuple[str, str], **settings: Any) -> list[Any]:
    outcomes = play(staged, *calls, **settings)
    assert [outcome.error for outcome in outcomes if outcome.error is not None] == []
    return [outcome.answer for outcome in outcomes]


@pytest.mark.parametrize("path", ["/openai/v1", "/v1"])
def test_openai_gets_responses_tools_and_models(staged: ClientStage, path: str) -> None:
    whole, stream, tool, models, one = answers(
        staged,
        ("responses", "economy"),
        ("responses stream", "economy"),
        ("responses tool", "economy"),
        ("openai models", ""),
        ("openai model", "economy"),
        openai_path=path,
    )
    assert whole[1] == stream[1] > 0
    assert len(whole[0].split()) == whole[2] > 0
    assert len(stream[0].split()) == stream[2] > 0
    assert tool == ["function_call", "weather"]
    assert {"premium", "economy"} <= set(models)
    assert one == "economy"


@pytest.mark.parametrize("path", ["/anthropic", ""])
def test_anthropic_gets_messages_tools_counts_and_models(staged: ClientStage, path: str) -> None:
    whole, stream, beta, tool, counted, models = answers(
        staged,
        ("messages", "premium"),
        ("messages stream", "premium"),
        ("beta messages", "premium"),
        ("messages tool", "premium"),
        ("count tokens", "premium"),
        ("anthropic models", ""),
        anthropic_path=path,
    )
    assert whole == stream
    assert len(whole[0].split()) == whole[2] > 0
    assert beta[1] == whole[1]
    assert tool == ["tool_use", "weather"]
    assert counted == whole[1]
    assert {"premium", "economy"} <= set(models)


@pytest.mark.parametrize(
    ("operation", "model", "kind", "status", "words"),
    [
        ("responses", "unknown", "BadRequestError", 400, "there is no label for 'unknown'"),
        ("background", "economy", "BadRequestError", 400, "'background'"),
        ("embeddings", "economy", "BadRequestError", 400, "InvokeModel"),
        ("openai model", "unknown", "NotFoundError", 404, "there is no label 'unknown'"),
        ("messages", "unknown", "BadRequestError", 400, "there is no label for 'unknown'"),
        ("messages stream", "unknown", "BadRequestError", 400, "there is no label for 'unknown'"),
    ],
)
def test_sdk_raises_its_own_error(
    staged: ClientStage, operation: str, model: str, kind: str, status: int, words: str
) -> None:
    (outcome,) = play(staged, (operation, model))
    assert outcome.error is not None
    assert (outcome.error["kind"], outcome.error["status"]) == (kind, status)
    assert words in outcome.error["message"]


@pytest.mark.parametrize("operation", ["responses", "messages"])
def test_sdk_raises_its_own_error_for_a_bad_token(staged: ClientStage, operation: str) -> None:
    (outcome,) = play(staged, (operation, "premium"), token="wrong")
    assert outcome.error is not None
    assert (outcome.error["kind"], outcome.error["status"]) == ("PermissionDeniedError", 403)
