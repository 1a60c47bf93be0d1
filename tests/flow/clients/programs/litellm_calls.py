"""LiteLLM's SDK: completions through Bedrock's Converse, as a whole and as a stream."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import litellm
from telling import Call, summary, tell


def opened(settings: dict[str, Any]) -> Call:
    def call(operation: str, arguments: dict[str, Any]) -> Any:
        asked = {
            "model": f"bedrock/converse/{arguments['model']}",
            "messages": [{"role": "user", "content": arguments["text"]}],
            **settings,
        }
        if operation == "ask":
            whole = litellm.completion(**asked)
            return summary(whole.choices[0].message.content, whole.usage.prompt_tokens, whole.usage.completion_tokens)
        chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        return summary(text, chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens)

    return call


if __name__ == "__main__":
    tell(version("litellm"), opened)
