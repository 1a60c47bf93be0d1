"""Amazon Titan Embeddings: a text in, a vector out; only input is billed."""

from __future__ import annotations

from bedrock_simulator import tokens
from bedrock_simulator.aws_errors import malformed_request
from bedrock_simulator.families.family import Family, Json, build_text_pieces, get_required
from bedrock_simulator.families.vectors import binarize, build_unit_vector
from bedrock_simulator.generation import Completion, Prompt
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import Piece

_V1_DIMENSIONS = 1536  # the only size of the first version
_DIMENSIONS = (256, 512, 1024)


def _parse_prompt(body: Json) -> Prompt:
    if body.get("dimensions") not in (None, *_DIMENSIONS):
        raise malformed_request(f"#/dimensions: {body['dimensions']} is not a valid enum value")
    if "inputImage" in body:
        text = body.get("inputText")
        return Prompt([Piece(tokens.IMAGE_TOKENS, body["inputImage"]), *(build_text_pieces(text) if text else [])])
    return Prompt(build_text_pieces(get_required(body, "inputText", str)))


def _build_body(body: Json, completion: Completion, model: Model) -> Json:
    is_v1 = "embed-text-v1" in model.name or "embed-g1" in model.name
    vector = build_unit_vector(
        completion.seed, body.get("dimensions") or (_V1_DIMENSIONS if is_v1 else _DIMENSIONS[-1])
    )
    answer: Json = {"embedding": vector, "inputTextTokenCount": completion.usage.input_tokens}
    if not is_v1:
        kinds = body.get("embeddingTypes") or ["float"]
        answer["embeddingsByType"] = {kind: binarize(vector) if kind == "binary" else vector for kind in kinds}
    return answer


FAMILY = Family(_parse_prompt, _build_body, has_output=False)
