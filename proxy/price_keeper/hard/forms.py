"""The forms of requests: of each operation and family what it may hold, and where it says how long answers are. Pure.

What a form does not know is refused, so a new parameter is refused until somebody has looked at what it costs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from price_keeper.forwarding.model_path import Operation
from price_keeper.hard import chats, claude, conversation
from price_keeper.hard.members import read_json, make_members_reader, ignore_members, read_text, read_texts, build_unbounded_error
from price_keeper.hard.tally import MemberReader

Path = tuple[str, ...]
Json = Mapping[str, Any]


class Form(NamedTuple):
    """`caps` are the members that limit an answer's tokens, the first is put in where there is none; without any there
    is no output to pay for. `times` are those that ask for several answers. `extra` may stand in `additional` fields
    of Converse as well."""

    caps: tuple[Path, ...]
    members: Mapping[str, MemberReader]
    times: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    additional: str = ""  # the member that holds another form's `extra`
    inner: Form | None = None


_ADDITIONAL = "additionalModelRequestFields"
CHATS = Form((("max_completion_tokens",), ("max_tokens",)), chats.MEMBERS, ("n",), chats.EXTRA)

_CLAUDE = Form((("max_tokens",),), claude.MEMBERS, (), claude.EXTRA)
_CLAUDE_TEXT = Form(
    (("max_tokens_to_sample",),),
    {
        **ignore_members("anthropic_version", "max_tokens_to_sample", "temperature", "top_k", "top_p", "stop_sequences"),
        "prompt": read_text,
    },
)
_NOVA = Form(
    (("inferenceConfig", "maxTokens"), ("inferenceConfig", "max_new_tokens")),
    {
        **ignore_members("schemaVersion"),
        "messages": conversation.messages,
        "system": conversation.system,
        "toolConfig": conversation.tool_config,
        "inferenceConfig": conversation.nova_inference_config,
        "reasoningConfig": conversation.no_reasoning,
    },
    (),
    ("inferenceConfig", "reasoningConfig"),
)
_TITAN_CONFIG = ignore_members("maxTokenCount", "stopSequences", "temperature", "topP")
_TITAN = Form(
    (("textGenerationConfig", "maxTokenCount"),),
    {"inputText": read_text, "textGenerationConfig": make_members_reader("textGenerationConfig", _TITAN_CONFIG)},
)
_TITAN_EMBED = Form((), {"inputText": read_text, **ignore_members("dimensions", "normalize", "embeddingTypes")})
_LLAMA = Form(
    (("max_gen_len",),),
    {
        **ignore_members("max_gen_len", "temperature", "top_p"),
        "prompt": read_text,
        "images": lambda tally, value: tally.leave("an image") if value else None,
    },
    (),
    ("max_gen_len", "temperature", "top_p"),
)
_PROMPT: dict[str, MemberReader] = {**chats.SAMPLING, **ignore_members("max_tokens"), "prompt": read_text}
_COMPLETION = Form((("max_tokens",),), _PROMPT, (), ("max_tokens", *chats.SAMPLING))
_CHAT: dict[str, MemberReader] = {
    **chats.SAMPLING,
    **ignore_members("max_tokens", "n"),
    "messages": chats.messages,
    "tools": chats.tools,
    "response_format": read_json,
}
_MISTRAL = Form((("max_tokens",),), _CHAT, ("n",), ("max_tokens", "n", *chats.SAMPLING))
_DEEPSEEK = Form((("max_tokens",), ("max_completion_tokens",)), chats.MEMBERS, ("n",), chats.EXTRA)
_JAMBA = Form((("max_tokens",),), {**_CHAT, "documents": chats.material}, ("n",), ("max_tokens", "n", *chats.SAMPLING))
_JURASSIC = Form(
    (("maxTokens",),),
    {
        **ignore_members("maxTokens", "minTokens", "numResults", "temperature", "topP", "topKReturn", "stopSequences"),
        **ignore_members("countPenalty", "presencePenalty", "frequencyPenalty"),
        "prompt": read_text,
    },
    ("numResults",),
)
_COHERE_SAMPLING = ("max_tokens", "temperature", "p", "k", "stop_sequences", "seed", "stream")
_COMMAND = Form(
    (("max_tokens",),),
    {
        **ignore_members(*_COHERE_SAMPLING, "num_generations", "return_likelihoods", "logit_bias", "truncate"),
        "prompt": read_text,
    },
    ("num_generations",),
)
_COMMAND_R = Form(
    (("max_tokens",),),
    {
        **ignore_members(*_COHERE_SAMPLING, "frequency_penalty", "presence_penalty", "prompt_truncation", "return_prompt"),
        **ignore_members("raw_prompting", "search_queries_only", "num_generations"),
        "message": read_text,
        "preamble": read_text,
        "chat_history": chats.history,
        "documents": chats.material,
        "tools": chats.material,
        "tool_results": chats.material,
    },
    ("num_generations",),
    (*_COHERE_SAMPLING, "frequency_penalty", "presence_penalty", "num_generations"),
)
_COHERE_EMBED = Form(
    (),
    {**ignore_members("input_type", "truncate", "embedding_types", "output_dimension", "max_tokens"), "texts": read_texts},
)

# By Bedrock's own ids alone: behind an ARN of the account's there may be any model.
_TITAN_EMBEDS = re.compile(r"(?:^|[./])amazon\.titan-(?:embed-text|embed-g1-text|e1t)-")


def _cohere(_: str, document: Json) -> Form:
    """A model that embeds has no use for a message, and one that speaks does nothing without."""
    if "message" in document:
        return _COMMAND_R
    return _COMMAND if "prompt" in document else _COHERE_EMBED


_INVOKED: Mapping[str, Callable[[str, Json], Form]] = {
    "anthropic": lambda _, document: _CLAUDE if "messages" in document else _CLAUDE_TEXT,
    "nova": lambda _, __: _NOVA,
    "titan": lambda model, _: _TITAN_EMBED if _TITAN_EMBEDS.search(model) else _TITAN,
    "llama": lambda _, __: _LLAMA,
    "mistral": lambda _, document: _MISTRAL if "messages" in document else _COMPLETION,
    "cohere": _cohere,
    "ai21": lambda _, document: _JAMBA if "messages" in document else _JURASSIC,
    "deepseek": lambda _, document: _DEEPSEEK if "messages" in document else _COMPLETION,
    "openai": lambda _, __: CHATS,
}
_CONVERSING = {
    "anthropic": _CLAUDE._replace(
        caps=(*_CLAUDE.caps, ("max_tokens_to_sample",)),
        members={**claude.MEMBERS, **ignore_members("max_tokens_to_sample")},
    ),
    "nova": _NOVA,
    "titan": _TITAN,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "cohere": _COMMAND_R,
    "ai21": _JAMBA,
    "deepseek": _DEEPSEEK,
    "openai": CHATS,
}


def _conversation(inner: Form) -> Form:
    known = {name: inner.members[name] for name in inner.extra}
    return Form(
        (("inferenceConfig", "maxTokens"),),
        {
            **ignore_members("additionalModelResponseFieldPaths", "guardrailConfig", "performanceConfig"),
            **ignore_members("requestMetadata", "serviceTier"),
            "messages": conversation.messages,
            "system": conversation.system,
            "toolConfig": conversation.tool_config,
            "inferenceConfig": conversation.inference_config,
            "outputConfig": read_json,
            "promptVariables": conversation.no_prompt_variables,
            _ADDITIONAL: make_members_reader(_ADDITIONAL, known),
        },
        additional=_ADDITIONAL,
        inner=inner,
    )


_CONVERSATIONS = {format: _conversation(inner) for format, inner in _CONVERSING.items()}
_CONVERSE = frozenset({Operation.CONVERSE, Operation.CONVERSE_STREAM})


def form_of(operation: Operation, format: str, model: str, document: Json) -> Form:
    """Raises InvalidRequest."""
    conversation.no_stored_prompt(model)
    if operation is Operation.CHAT_COMPLETIONS:
        return CHATS
    if format not in _INVOKED:
        raise build_unbounded_error(f"a model of format {format!r}")
    return _CONVERSATIONS[format] if operation in _CONVERSE else _INVOKED[format](model, document)
