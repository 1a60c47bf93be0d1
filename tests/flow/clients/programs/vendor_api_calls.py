"""openai and anthropic with nothing but an address and a token: responses, messages, lists of models."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import anthropic
import openai
from telling import Call, tell

MAX_TOKENS = 60
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def opened(settings: dict[str, Any]) -> Call:
    url, token = settings["url"], settings["token"]
    openai_client = openai.OpenAI(base_url=f"{url}{settings.get('openai_path', '/openai/v1')}", api_key=token)
    anthropic_client = anthropic.Anthropic(
        base_url=f"{url}{settings.get('anthropic_path', '/anthropic')}", api_key=token
    )

    def respond(model: str, **more: Any) -> Any:
        return openai_client.responses.create(model=model, input="hello", max_output_tokens=MAX_TOKENS, **more)

    def call(operation: str, arguments: dict[str, Any]) -> Any:
        model = arguments.get("model", "")
        asked = {"model": model, "max_tokens": MAX_TOKENS, "messages": [{"role": "user", "content": "hello"}]}
        match operation:
            case "responses":
                found = respond(model)
                return [found.output_text, found.usage.input_tokens, found.usage.output_tokens]
            case "responses stream":
                with openai_client.responses.stream(model=model, input="hello", max_output_tokens=MAX_TOKENS) as stream:
                    found = stream.get_final_response()
                return [found.output_text, found.usage.input_tokens, found.usage.output_tokens]
            case "responses tool":
                tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
                (item,) = respond(model, tools=[tool], tool_choice="required").output
                return [item.type, item.name]
            case "openai models":
                return [each.id for each in openai_client.models.list()]
            case "openai model":
                return openai_client.models.retrieve(model).id
            case "embeddings":
                return openai_client.embeddings.create(model=model, input="hello")
            case "background":
                return respond(model, background=True)
            case "messages":
                found = anthropic_client.messages.create(**asked)
                return [found.content[0].text, found.usage.input_tokens, found.usage.output_tokens]
            case "messages stream":
                with anthropic_client.messages.stream(**asked) as stream:
                    found = stream.get_final_message()
                return [found.content[0].text, found.usage.input_tokens, found.usage.output_tokens]
            case "messages tool":
                tool = {"name": "weather", "input_schema": SCHEMA}
                found = anthropic_client.messages.create(**asked, tools=[tool], tool_choice={"type": "any"})
                return [found.content[0].type, found.content[0].name]
            case "beta messages":
                found = anthropic_client.beta.messages.create(**asked, betas=["context-1m-2025-08-07"])
                return [found.content[0].text, found.usage.input_tokens, found.usage.output_tokens]
            case "count tokens":
                return anthropic_client.messages.count_tokens(model=model, messages=asked["messages"]).input_tokens
            case "anthropic models":
                return [each.id for each in anthropic_client.models.list()]
            case _:
                raise ValueError(operation)

    return call


def described(failure: BaseException) -> dict[str, Any]:
    return {"kind": type(failure).__name__, "status": getattr(failure, "status_code", None), "message": str(failure)}


if __name__ == "__main__":
    tell(f"openai {version('openai')}, anthropic {version('anthropic')}", opened, described)
