"""Amazon Titan Embeddings: a text in, a vector out, only input to pay for."""

from __future__ import annotations

from bedrock_simulator import tokens
from bedrock_simulator.families.family import Family, Json, plain, required
from bedrock_simulator.families.vectors import signs, unit_vector
from bedrock_simulator.generation import Completion, Prompt
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import Piece
from bedrock_simulator.refusals import malformed_request

_FIRST_DIMENSIONS = 1536  # of the first version, which knows no other
_DIMENSIONS = (256, 512, 1024)


def _read(body: Json) -> Prompt:
    if body.get("dimensions") not in (None, *_DIMENSIONS):
        raise malformed_request(f"#/dimensions: {body['dimensions']} is not a valid enum value")
    if "inputImage" in body:
        text = body.get("inputText")
        return Prompt([Piece(tokens.IMAGE_TOKENS, body["inputImage"]), *(plain(text) if text else [])])
    return Prompt(plain(required(body, "inputText", str)))


def _whole(body: Json, said: Completion, model: Model) -> Json:
    is_first = "embed-text-v1" in model.name or "embed-g1" in model.name
    vector = unit_vector(said.seed, body.get("dimensions") or (_FIRST_DIMENSIONS if is_first else _DIMENSIONS[-1]))
    answer: Json = {"embedding": vector, "inputTextTokenCount": said.usage.input_tokens}
    if not is_first:
        kinds = body.get("embeddingTypes") or ["float"]
        answer["embeddingsByType"] = {kind: signs(vector) if kind == "binary" else vector for kind in kinds}
    return answer


FAMILY = Family(_read, _whole, speaks=False)
