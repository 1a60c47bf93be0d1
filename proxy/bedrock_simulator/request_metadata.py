"""Checks request metadata, which callers attach for the invocation logs, by Bedrock's rules. Pure."""

from __future__ import annotations

import re
from typing import Any

import orjson

from bedrock_simulator.aws_errors import constraint_violation, malformed_request

HEADER = "X-Amzn-Bedrock-Request-Metadata"

_MAX_PAIRS = 16
_MAX_HEADER_CHARS = 8500
_CHARACTERS = r"[a-zA-Z0-9\s:_@$#=/+,\-.]"
_KEY = re.compile(_CHARACTERS + "{1,256}")
_VALUE = re.compile(_CHARACTERS + "{0,256}")


def check_metadata(metadata: Any, name: str = "requestMetadata") -> None:
    if not isinstance(metadata, dict) or not 1 <= len(metadata) <= _MAX_PAIRS:
        raise constraint_violation(metadata, name, f"be a map of 1 to {_MAX_PAIRS} pairs")
    for key, value in metadata.items():
        if not _KEY.fullmatch(key):
            raise constraint_violation(key, name, f"have keys that match {_KEY.pattern}")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise constraint_violation(value, name, f"have values that match {_VALUE.pattern}")


def check_header(text: str) -> None:
    if len(text) > _MAX_HEADER_CHARS:
        raise constraint_violation(len(text), HEADER, f"have length less than or equal to {_MAX_HEADER_CHARS}")
    try:
        metadata = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise malformed_request(f"{HEADER} is not JSON") from None
    check_metadata(metadata, HEADER)
