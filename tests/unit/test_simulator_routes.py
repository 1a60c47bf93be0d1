"""Paths of the data plane, encoded or raw, and the models they name."""

from __future__ import annotations

import pytest
from bedrock_simulator.aws_errors import AwsError
from bedrock_simulator.models import UNKNOWN_FAMILY, resolve_model
from bedrock_simulator.routes import find_route

PROFILE = "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc123def456"


@pytest.mark.parametrize(
    ("method", "target", "operation", "labels"),
    [
        ("POST", "/model/anthropic.claude-v2%3A1/invoke", "InvokeModel", ("anthropic.claude-v2:1",)),
        ("POST", "/model/anthropic.claude-v2:1/invoke", "InvokeModel", ("anthropic.claude-v2:1",)),
        ("POST", "/model/m/invoke-with-response-stream", "InvokeModelWithResponseStream", ("m",)),
        ("POST", f"/model/{PROFILE.replace('/', '%2F').replace(':', '%3A')}/converse", "Converse", (PROFILE,)),
        ("POST", "/model/m/converse-stream", "ConverseStream", ("m",)),
        ("POST", "/model/m/count-tokens", "CountTokens", ("m",)),
        ("POST", "/guardrail/gr1/version/DRAFT/apply", "ApplyGuardrail", ("gr1", "DRAFT")),
        ("POST", "/guardrail-checks/invoke", "InvokeGuardrailChecks", ()),
        ("POST", "/async-invoke", "StartAsyncInvoke", ()),
        ("GET", "/async-invoke?maxResults=2", "ListAsyncInvokes", ()),
        ("GET", "/async-invoke/arn%3Aaws%3Ax%2Fy", "GetAsyncInvoke", ("arn:aws:x/y",)),
        ("POST", "/openai/v1/chat/completions", "ChatCompletions", ()),
        ("POST", "/inference-profiles", "CreateInferenceProfile", ()),
        ("GET", "/inference-profiles/arn%3Aaws%3Ax%2Fy", "GetInferenceProfile", ("arn:aws:x/y",)),
    ],
)
def test_path_names_operation_and_labels(method, target, operation, labels):
    route = find_route(method, target)
    assert route is not None
    assert (route.operation, route.labels) == (operation, labels)


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/model/m/invoke"),
        ("POST", "/model/m/explain"),
        ("POST", "/model//invoke"),
        ("POST", f"/model/{PROFILE}/converse"),  # a raw slash is one of the path's own
        ("POST", "/model/m/invoke/"),
        ("POST", "/"),
        ("POST", "model/m/invoke"),
        ("PUT", "/async-invoke"),
    ],
)
def test_other_path_is_no_operation(method, target):
    assert find_route(method, target) is None


def test_query_is_kept_apart():
    route = find_route("GET", "/async-invoke?maxResults=2&nextToken=3")
    assert route is not None
    assert route.query == "maxResults=2&nextToken=3"


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("anthropic.claude-sonnet-4-5-20250929-v1:0", "anthropic"),
        ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", "anthropic"),
        ("global.anthropic.claude-haiku-4-5-20251001-v1:0", "anthropic"),
        ("amer.anthropic.claude-sonnet-4-6", "anthropic"),
        ("us-gov.amazon.nova-lite-v1:0", "nova"),
        ("arn:aws:bedrock:::foundation-model/anthropic.claude-sonnet-4-6", "anthropic"),
        ("arn:aws:bedrock:eu-west-1:123456789012:inference-profile/eu.amazon.nova-pro-v1:0", "nova"),
        ("arn:aws:bedrock:us-east-1::foundation-model/meta.llama3-70b-instruct-v1:0", "llama"),
        ("amazon.titan-text-express-v1", "titan"),
        ("amazon.titan-embed-text-v2:0", "titan-embed"),
        ("mistral.mistral-7b-instruct-v0:2", "mistral"),
        ("cohere.command-r-plus-v1:0", "cohere"),
        ("cohere.embed-english-v3", "cohere-embed"),
        ("ai21.jamba-1-5-large-v1:0", "ai21"),
        ("us.deepseek.r1-v1:0", "deepseek"),
        ("openai.gpt-oss-120b-1:0", "openai"),
        ("qwen.qwen3-coder-480b-a35b-v1:0", "openai"),
        (PROFILE, UNKNOWN_FAMILY),
    ],
)
def test_model_id_determines_family(model, family):
    assert resolve_model(model).family == family


@pytest.mark.parametrize(
    "model", ["premium", "nobody.model-v1", "", "arn:aws:bedrock:us-east-1:1:agent/x", "arn:aws:s3:::x"]
)
def test_unknown_model_id_is_invalid(model):
    with pytest.raises(AwsError, match="The provided model identifier is invalid"):
        resolve_model(model)


@pytest.mark.parametrize(
    ("body", "family"),
    [
        ({"anthropic_version": "bedrock-2023-05-31", "messages": []}, "anthropic"),
        ({"messages": [], "inferenceConfig": {}}, "nova"),
        ({"inputText": "x", "textGenerationConfig": {}}, "titan"),
        ({"schemaVersion": "messages-v1", "messages": []}, "nova"),
        ({"inputText": "x"}, "titan-embed"),
        ({"prompt": "x", "max_gen_len": 5}, "llama"),
        ({"prompt": "x"}, "llama"),
        ({"texts": ["x"]}, "cohere-embed"),
        ({"message": "x"}, "cohere"),
        ({"messages": []}, "openai"),
        ({"unheard": "of"}, ""),
    ],
)
def test_body_determines_family_behind_opaque_arn(body, family):
    assert resolve_model(PROFILE).find_family(body) == family
