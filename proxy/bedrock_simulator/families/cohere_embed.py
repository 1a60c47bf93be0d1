"""Cohere Embed: several texts in, a vector for each out. Its body does not tell what was read; the headers do."""

from __future__ import annotations

from bedrock_simulator import tokens
from bedrock_simulator.families.family import Family, Json, required
from bedrock_simulator.families.vectors import signs, unit_vector
from bedrock_simulator.generation import Completion, Prompt
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import Piece
from bedrock_simulator.refusals import malformed_request

_DIMENSIONS = 1024
_MOST_TEXTS = 96
_LARGEST_INT8 = 127


def _read(body: Json) -> Prompt:
    required(body, "input_type", str)
    if body.get("images"):
        return Prompt([Piece(tokens.IMAGE_TOKENS, image) for image in body["images"]])
    texts = required(body, "texts", list)
    if not 1 <= len(texts) <= _MOST_TEXTS or not all(isinstance(text, str) for text in texts):
        raise malformed_request(f"#/texts: expected 1 to {_MOST_TEXTS} strings")
    return Prompt([Piece(tokens.count_tokens(text), text) for text in texts])


def _whole(body: Json, said: Completion, _: Model) -> Json:
    texts = body.get("texts") or []
    vectors = [unit_vector(said.seed + bytes([index]), _DIMENSIONS) for index in range(max(1, len(texts)))]
    kinds = body.get("embedding_types")
    return {
        "id": said.id,
        "texts": texts,
        "response_type": "embeddings_by_type" if kinds else "embeddings_floats",
        "embeddings": {kind: [_as(kind, each) for each in vectors] for kind in kinds} if kinds else vectors,
    }


def _as(kind: str, vector: list[float]) -> list[float] | list[int]:
    if kind in ("int8", "uint8"):
        return [round(value * _LARGEST_INT8) for value in vector]
    return signs(vector) if kind in ("binary", "ubinary") else vector


FAMILY = Family(_read, _whole, speaks=False)
