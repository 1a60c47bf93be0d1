"""Cohere Embed: several texts in, one vector each out. Token counts are in the headers only."""

from __future__ import annotations

from bedrock_simulator import tokens
from bedrock_simulator.aws_errors import malformed_request
from bedrock_simulator.families.family import Family, Json, get_required
from bedrock_simulator.families.vectors import binarize, build_unit_vector
from bedrock_simulator.generation import Completion, Prompt
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import Piece

_DIMENSIONS = 1024
_MAX_TEXTS = 96
_MAX_INT8 = 127


def _parse_prompt(body: Json) -> Prompt:
    get_required(body, "input_type", str)
    if body.get("images"):
        return Prompt([Piece(tokens.IMAGE_TOKENS, image) for image in body["images"]])
    texts = get_required(body, "texts", list)
    if not 1 <= len(texts) <= _MAX_TEXTS or not all(isinstance(text, str) for text in texts):
        raise malformed_request(f"#/texts: expected 1 to {_MAX_TEXTS} strings")
    return Prompt([Piece(tokens.count_tokens(text), text) for text in texts])


def _build_body(body: Json, completion: Completion, _: Model) -> Json:
    texts = body.get("texts") or []
    vectors = [build_unit_vector(completion.seed + bytes([index]), _DIMENSIONS) for index in range(max(1, len(texts)))]
    kinds = body.get("embedding_types")
    return {
        "id": completion.id,
        "texts": texts,
        "response_type": "embeddings_by_type" if kinds else "embeddings_floats",
        "embeddings": {kind: [_convert_vector(kind, each) for each in vectors] for kind in kinds} if kinds else vectors,
    }


def _convert_vector(kind: str, vector: list[float]) -> list[float] | list[int]:
    if kind in ("int8", "uint8"):
        return [round(value * _MAX_INT8) for value in vector]
    return binarize(vector) if kind in ("binary", "ubinary") else vector


FAMILY = Family(_parse_prompt, _build_body, has_output=False)
