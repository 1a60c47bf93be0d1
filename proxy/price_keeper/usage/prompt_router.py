"""Prompt routers: which model served a call, as the trace in its answer says. Pure.

Bedrock charges the tokens at the prices of that model, and a fee for each call. Only answers of Converse have the
trace.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Final

from price_keeper.upstream.eventstream import FrameWatcher
from price_keeper.usage import fast_parse
from price_keeper.usage.price_table import PRICE_UNKNOWN, Cost, Pricer
from price_keeper.usage.stream_usage import parse_json
from price_keeper.usage.token_usage import Usage
from price_keeper.usage.usage_reader import EVENT_STREAM, BodyBuffer

MAX_METADATA_BYTES: Final = 256 * 1024
_ROUTER_ARN: Final = re.compile(r"arn:[^:]*:bedrock:[^:]*:[^:]*:(?:default-)?prompt-router/.+")
_FEE: Final = "routed_request"
_UNKNOWN_FLAGS: Final = frozenset((PRICE_UNKNOWN,))


def is_prompt_router(model: str) -> bool:
    return _ROUTER_ARN.fullmatch(model) is not None


def add_fee(usage: Usage, sold: Collection[str]) -> Usage:
    """Add the fee, if the label has a price of it."""
    if _FEE not in sold:
        return usage
    return usage._replace(quantities={**usage.quantities, _FEE: 1})


def price_invoked(own: Pricer, invoked: Pricer | None) -> Pricer:
    """Tokens at the prices of the invoked model, and pieces at the router's own. If the model is not known or has no
    label, its tokens have the router's own prices and are flagged."""
    tokens_pricer, flags = (own, _UNKNOWN_FLAGS) if invoked is None else (invoked, frozenset[str]())

    def price(usage: Usage) -> Cost:
        tokens = tokens_pricer.price(usage._replace(quantities={}))
        pieces = own.price(Usage(quantities=usage.quantities))
        return Cost(tokens.pico + pieces.pico, tokens.flags | pieces.flags | flags)

    return Pricer(price, tokens_pricer.description)


class InvokedModelReader:
    """Reads the id of the invoked model from a whole answer, or from the last event of a stream."""

    __slots__ = ("_body", "_model", "_watcher")

    def __init__(self, content_type: bytes) -> None:
        is_stream = content_type.lower().startswith(EVENT_STREAM)
        self._watcher = FrameWatcher({"metadata": MAX_METADATA_BYTES}) if is_stream else None
        self._body = BodyBuffer()
        self._model = ""

    def feed(self, data: bytes) -> None:
        if self._watcher is None:
            self._body.feed(data)
            return
        for frame in self._watcher.feed(data):
            if frame.kind == "event" and frame.payload_size == len(frame.payload):
                self._model = _read_invoked_model(parse_json(frame.payload)) or self._model

    def model(self) -> str:
        """Empty if the answer does not say it."""
        if self._watcher is not None:
            return self._model
        return _read_invoked_model(fast_parse.pick_trace_members(self._body.to_bytes()))


def _read_invoked_model(document: Any) -> str:
    for name in ("trace", "promptRouter", "invokedModelId"):
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, str) else ""
