"""Token counts without a tokenizer: four bytes are one token, which is about right. Pure."""

from __future__ import annotations

from typing import Any

import orjson

# The overhead that real models add, so that the text alone is no upper bound of the input tokens.
MESSAGE_TOKENS = 4  # the delimiters of each message
TOOL_PROMPT_TOKENS = 346  # the provider's own system prompt for tools
IMAGE_TOKENS = 1500  # an image of about a megapixel, whatever the size of its file


def count_tokens(text: str) -> int:
    return (len(text if text.isascii() else text.encode()) + 3) // 4


def count_block_tokens(block: Any) -> int:
    """The tokens of a content block of any family. A block that is neither text nor image counts as its JSON text."""
    if isinstance(block, str):
        return count_tokens(block)
    if isinstance(block, dict):
        text = block.get("text")
        if isinstance(text, str):
            return count_tokens(text)
        if "image" in block or block.get("type") in ("image", "image_url"):
            return IMAGE_TOKENS
    return (len(orjson.dumps(block)) + 3) // 4
