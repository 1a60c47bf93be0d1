"""anthropic[bedrock]: messages as a whole and as a stream."""

from __future__ import annotations

from typing import Any

import anthropic
from telling import Call, summary, tell

MAX_TOKENS = 40


def opened(settings: dict[str, Any]) -> Call:
    client = anthropic.AnthropicBedrock(**settings)

    def call(operation: str, arguments: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": arguments["text"]}]
        asked = {"model": arguments["model"], "max_tokens": MAX_TOKENS, "messages": messages}
        if operation == "ask":
            return _summary(client.messages.create(**asked))
        with client.messages.stream(**asked) as stream:
            return _summary(stream.get_final_message())

    return call


def _summary(message: Any) -> dict[str, Any]:
    text = "".join(block.text for block in message.content)
    return summary(text, message.usage.input_tokens, message.usage.output_tokens)


if __name__ == "__main__":
    tell(anthropic.__version__, opened)
