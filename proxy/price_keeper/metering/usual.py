"""Reads the answers that nearly all are, by their shape and in a third of the time. Pure.

Whatever is not just so is left to the readers that know every case, so nothing here has to be complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from msgspec import UNSET, Meta, MsgspecError, Raw, Struct, defstruct
from msgspec.json import Decoder
from msgspec.structs import astuple

from price_keeper.metering.bodies import EMBEDDING_MEMBERS, MAX_TOKENS
from price_keeper.metering.usage import Usage, make_plain_usage

_Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class _Tokens(Struct, rename="camel", gc=False):
    input_tokens: _Count
    output_tokens: _Count
    total_tokens: _Count = 0
    cache_read_input_tokens: _Count = 0
    cache_read_input_token_count: _Count = 0
    cache_write_input_tokens: _Count = 0
    cache_write_input_token_count: _Count = 0
    cache_details: Any = None


class _Converse(Struct, rename="camel", gc=False):
    usage: _Tokens
    service_tier: Any = None
    performance_config: Any = None


# Every member that any reader of a whole answer looks at, by the names of `bodies`; and those of a guardrail's traces.
_TELLING = ("usage", "service_tier", "serviceTier", "performanceConfig", "inputTextTokenCount", "results",
            "totalOutputTextTokenCount", "prompt_token_count", "generation_token_count", "inputTokenCount",
            "outputTokenCount", "cacheReadInputTokenCount", "cacheWriteInputTokenCount", "meta", "prompt",
            "completions")  # fmt: skip
_TRACED = ("trace", "amazon-bedrock-trace", "stopReason", "amazon-bedrock-guardrailAction")

_NULL = Raw(b"null")


def _picking(names: tuple[str, ...], raw: tuple[str, ...] = ()) -> Callable[[bytes], dict[str, Any] | None]:
    """Reads the members of these names. Of the others, such as images, nothing is made: they take a tenth of the time;
    nor of those that are `raw`, which are only there or not. None for what is no JSON object, or none that can be
    read so."""
    plain = [f"member{number}" for number in range(len(names) + len(raw))]
    rename = dict(zip(plain, names + raw, strict=True))
    kinds = [Any] * len(names) + [Raw] * len(raw)
    members = [(name, kind, UNSET) for name, kind in zip(plain, kinds, strict=True)]
    shape = defstruct("_Picked", members, rename=rename, gc=False)
    decode = Decoder(shape).decode

    def picked(answer: bytes) -> dict[str, Any] | None:
        try:
            values = astuple(decode(answer))
        except (MsgspecError, ValueError, RecursionError):
            return None
        found = zip(names + raw, values, strict=True)
        return {name: value for name, value in found if value is not UNSET and value != _NULL}

    return picked


telling, traced = _picking(_TELLING, EMBEDDING_MEMBERS), _picking(_TRACED)
_converse = Decoder(_Converse).decode


def converse(answer: bytes) -> Usage | None:
    """No cache was written to, and nothing is said of tier or mode. None if it is not such an answer."""
    try:
        told = _converse(answer)
    except (MsgspecError, ValueError, RecursionError):
        return None
    tokens = told.usage
    if told.service_tier is not None or told.performance_config is not None or tokens.cache_details is not None:
        return None
    if tokens.cache_write_input_tokens or tokens.cache_write_input_token_count:
        return None
    cached, again = tokens.cache_read_input_tokens, tokens.cache_read_input_token_count
    if tokens.total_tokens > tokens.input_tokens + tokens.output_tokens + (cached or again):
        return None
    return make_plain_usage(tokens.input_tokens, tokens.output_tokens, cached) if not again or again == cached else None
