"""The request and response bodies of each model family, by the family's name in `models`."""

from bedrock_simulator.families import (
    ai21,
    anthropic,
    cohere,
    cohere_embed,
    deepseek,
    llama,
    mistral,
    nova,
    openai,
    titan,
    titan_embed,
)
from bedrock_simulator.families.family import Family

FAMILIES: dict[str, Family] = {
    "ai21": ai21.FAMILY,
    "anthropic": anthropic.FAMILY,
    "cohere": cohere.FAMILY,
    "cohere-embed": cohere_embed.FAMILY,
    "deepseek": deepseek.FAMILY,
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "nova": nova.FAMILY,
    "openai": openai.FAMILY,
    "titan": titan.FAMILY,
    "titan-embed": titan_embed.FAMILY,
}
