"""Embeddings: vectors that depend on the request alone, and input to pay for."""

from __future__ import annotations

import json

import pytest
from bedrock_simulator.aws_errors import AwsError

from tests.unit.test_simulator_families import Form, ask, at, whole

EMBEDDINGS = {
    "titan v1": ("amazon.titan-embed-text-v1", {"inputText": "hello"}, ("embedding",), 1536),
    "titan v2": ("amazon.titan-embed-text-v2:0", {"inputText": "hello", "dimensions": 256}, ("embedding",), 256),
    "titan by type": (
        "amazon.titan-embed-text-v2:0",
        {"inputText": "hello", "embeddingTypes": ["binary"]},
        ("embeddingsByType", "binary"),
        1024,
    ),
    "cohere": (
        "cohere.embed-english-v3",
        {"texts": ["hello", "there"], "input_type": "search_query"},
        ("embeddings", 1),
        1024,
    ),
    "cohere by type": (
        "cohere.embed-english-v3",
        {"texts": ["hello"], "input_type": "search_query", "embedding_types": ["float", "int8"]},
        ("embeddings", "int8", 0),
        1024,
    ),
}


@pytest.mark.parametrize(("model", "body", "path", "dimensions"), EMBEDDINGS.values(), ids=EMBEDDINGS.keys())
def test_embeddings_are_vectors_charged_by_input(model, body, path, dimensions):
    form = Form(model, body, path, (), "", (), None)
    answer = ask(form, "invoke")
    vector = at(json.loads(answer.body), path)
    assert len(vector) == dimensions
    assert len(set(vector)) > 1
    if all(isinstance(value, float) for value in vector):
        assert sum(value * value for value in vector) == pytest.approx(1)
    assert answer.usage.output_tokens == 0 < answer.usage.input_tokens
    assert "X-Amzn-Bedrock-Output-Token-Count" not in answer.headers
    assert answer.body == ask(form, "invoke").body
    with pytest.raises(AwsError, match="unsupported for streaming"):
        ask(form, "invoke-with-response-stream")


def test_titan_supports_three_dimensions():
    for dimensions in (256, 512, 1024):
        form = Form("amazon.titan-embed-text-v2:0", {"inputText": "x", "dimensions": dimensions}, (), (), "", (), None)
        assert len(whole(form)["embedding"]) == dimensions
    with pytest.raises(AwsError):
        whole(Form("amazon.titan-embed-text-v2:0", {"inputText": "x", "dimensions": 300}, (), (), "", (), None))
