"""Token counts without a tokenizer: four bytes are one token, which is about right. Pure."""

from __future__ import annotations

from typing import Any

import orjson

# What real models add of their own, so that nobody can take the bare text for an upper bound.
MESSAGE_TOKENS = 4  # the marks around each message
TOOL_PROMPT_TOKENS = 346  # the provider's own system prompt about tools
IMAGE_TOKENS = 1500  # a picture of about a megapixel, whatever its file weighs


def count_tokens(text: str) -> int:
    return (len(text if text.isascii() else text.encode()) + 3) // 4


def count_block_tokens(block: Any) -> int:
    """A block of content in any family's form. What is neither text nor a picture counts as the JSON it is."""
    if isinstance(block, str):
        return count_tokens(block)
    if isinstance(block, dict):
        text = block.get("text")
        if isinstance(text, str):
            return count_tokens(text)
        if "image" in block or block.get("type") in ("image", "image_url"):
            return IMAGE_TOKENS
    return (len(orjson.dumps(block)) + 3) // 4
