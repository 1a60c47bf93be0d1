"""Reads the answers that nearly all are, by their shape and in a third of the time. Pure.

Whatever is not just so is left to the readers that know every case, so nothing here has to be complete.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, MsgspecError, Struct
from msgspec.json import Decoder

from proxy.metering.bodies import MOST_TOKENS
from proxy.metering.usage import Usage, plain_usage

_Count = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]


class _Tokens(Struct, rename="camel", gc=False):
    input_tokens: _Count
    output_tokens: _Count
    cache_read_input_tokens: _Count = 0
    cache_read_input_token_count: _Count = 0
    cache_write_input_tokens: _Count = 0
    cache_write_input_token_count: _Count = 0
    cache_details: Any = None


class _Converse(Struct, rename="camel", gc=False):
    usage: _Tokens
    service_tier: Any = None
    performance_config: Any = None


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
    return plain_usage(tokens.input_tokens, tokens.output_tokens, cached) if not again or again == cached else None
