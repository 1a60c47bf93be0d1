"""openai: chat completions as a whole, and as a stream that ends with its usage."""

from __future__ import annotations

from typing import Any

import openai
from telling import Call, summary, tell

MAX_TOKENS = 40


def opened(settings: dict[str, Any]) -> Call:
    client = openai.OpenAI(**settings)

    def call(operation: str, arguments: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": arguments["text"]}]
        asked = {"model": arguments["model"], "max_tokens": MAX_TOKENS, "messages": messages}
        if operation == "ask":
            whole = client.chat.completions.create(**asked)
            return summary(whole.choices[0].message.content, whole.usage.prompt_tokens, whole.usage.completion_tokens)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        return summary(text, chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens)

    return call


if __name__ == "__main__":
    tell(openai.__version__, opened)
