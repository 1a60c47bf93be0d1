"""The known models: finds the family of body formats from a model id, an inference profile or an ARN. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from bedrock_simulator.aws_errors import validation_error

_FAMILIES = (
    ("anthropic.claude", "anthropic"),
    ("amazon.nova-canvas", ""),
    ("amazon.nova-reel", ""),
    ("amazon.nova-sonic", ""),
    ("amazon.nova", "nova"),
    ("amazon.titan-embed", "titan-embed"),
    ("amazon.titan-text", "titan"),
    ("amazon.titan-tg1", "titan"),
    ("amazon.titan-image", ""),
    ("meta.llama", "llama"),
    ("mistral.", "mistral"),
    ("cohere.embed", "cohere-embed"),
    ("cohere.command", "cohere"),
    ("ai21.", "ai21"),
    ("deepseek.", "deepseek"),
    ("openai.", "openai"),
    # Providers whose models use the format of chat completions.
    *((f"{provider}.", "openai") for provider in ("google", "minimax", "moonshot", "nvidia", "qwen", "xai", "zai")),
)

# ARNs of these kinds do not name the model; the body of the request shows its family.
_OPAQUE_KINDS = (
    "application-inference-profile",
    "custom-model",
    "custom-model-deployment",
    "default-prompt-router",
    "imported-model",
    "prompt-router",
    "provisioned-model",
)

# The first of these fields in a body determines its family.
_FAMILY_FIELDS = (
    ("anthropic_version", "anthropic"),
    ("schemaVersion", "nova"),
    ("inferenceConfig", "nova"),
    ("textGenerationConfig", "titan"),
    ("inputText", "titan-embed"),
    ("max_gen_len", "llama"),
    ("texts", "cohere-embed"),
    ("message", "cohere"),
    ("messages", "openai"),
    ("prompt", "llama"),
)

_EMBEDDING_FAMILIES = ("titan-embed", "cohere-embed")
_CACHING_FAMILIES = ("anthropic", "nova")
UNKNOWN_FAMILY = "untold"  # the family of a model behind an opaque ARN

_NAME = re.compile(r"(?:(?:us|us-gov|eu|apac|amer|global|jp|au|ca)\.)?([a-z0-9-]+\.[A-Za-z0-9._:-]+)")
_ARN = re.compile(r"arn:aws(?:-[a-z-]+)?:bedrock:[a-z0-9-]*:(?:\d{12})?:([a-z-]+)/(.+)")

_CACHE_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    name: str  # without the region prefix of an inference profile or the prefix of an ARN
    family: str

    @property
    def can_converse(self) -> bool:
        return self.family != "" and self.family not in _EMBEDDING_FAMILIES

    @property
    def can_cache(self) -> bool:
        return self.family in _CACHING_FAMILIES or self.family == UNKNOWN_FAMILY

    def find_family(self, body: dict[str, object]) -> str:
        if self.family != UNKNOWN_FAMILY:
            return self.family
        return next((family for field, family in _FAMILY_FIELDS if field in body), "")


@lru_cache(maxsize=_CACHE_SIZE)
def resolve_model(model_id: str) -> Model:
    """The model of this id. An id of an unknown provider raises Bedrock's own error."""
    arn = _ARN.fullmatch(model_id)
    if arn is None:
        return _find_model(model_id, model_id)
    kind, rest = arn.groups()
    if kind in ("foundation-model", "inference-profile"):
        return _find_model(model_id, rest)
    if kind in _OPAQUE_KINDS:
        return Model(model_id, rest, UNKNOWN_FAMILY)
    raise validation_error("The provided model identifier is invalid.")


def _find_model(model_id: str, text: str) -> Model:
    name = _NAME.fullmatch(text)
    if name is not None:
        for prefix, family in _FAMILIES:
            if name[1].startswith(prefix):
                return Model(model_id, name[1], family)
    raise validation_error("The provided model identifier is invalid.")
