"""Request forms by operation and model family: which members a body may have, and which of them limit its output. Pure.

A member that a form does not list is refused. A new parameter of a model stays refused until its cost has been checked
and a reader of it is added here. Start with `find_form`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from price_keeper.budgets.hard import chat_members, claude_members, converse_members, responses_members
from price_keeper.budgets.hard.token_bound import (
    MemberReader,
    build_unbounded_error,
    ignore_members,
    make_list_reader,
    make_members_reader,
    read_json,
    read_text,
)
from price_keeper.operations import BodyForm, Operation

MemberPath = tuple[str, ...]
Json = Mapping[str, Any]


class RequestForm(NamedTuple):
    """`caps` are the members that limit the tokens of an answer; the first is written into a body that has none, and a
    form without any has no output to pay for. `answer_counts` are members that ask for several answers.
    `additional_names` are members that Converse's additional fields may have too. What is sold by the piece needs a
    price of its pieces."""

    caps: tuple[MemberPath, ...]
    members: Mapping[str, MemberReader]
    answer_counts: tuple[str, ...] = ()
    additional_names: tuple[str, ...] = ()
    additional_member: str = ""  # the member that holds `additional_names` of the inner form
    inner_form: RequestForm | None = None
    is_sold_by_piece: bool = False


_ADDITIONAL_MEMBER = "additionalModelRequestFields"
CHAT_COMPLETIONS_FORM = RequestForm(
    (("max_completion_tokens",), ("max_tokens",)), chat_members.MEMBERS, ("n",), chat_members.ADDITIONAL_NAMES
)
_RESPONSES_FORM = RequestForm((("max_output_tokens",),), responses_members.MEMBERS)

_CLAUDE_FORM = RequestForm((("max_tokens",),), claude_members.MEMBERS, (), claude_members.ADDITIONAL_NAMES)
_CLAUDE_TEXT_FORM = RequestForm(
    (("max_tokens_to_sample",),),
    {
        **ignore_members(
            "anthropic_version", "max_tokens_to_sample", "temperature", "top_k", "top_p", "stop_sequences"
        ),
        "prompt": read_text,
    },
)
_NOVA_FORM = RequestForm(
    (("inferenceConfig", "maxTokens"), ("inferenceConfig", "max_new_tokens")),
    {
        **ignore_members("schemaVersion"),
        "messages": converse_members.read_messages,
        "system": converse_members.read_system,
        "toolConfig": converse_members.read_tool_config,
        "inferenceConfig": converse_members.read_nova_inference_config,
        "reasoningConfig": converse_members.reject_reasoning,
    },
    (),
    ("inferenceConfig", "reasoningConfig"),
)
_TITAN_CONFIG_MEMBERS = ignore_members("maxTokenCount", "stopSequences", "temperature", "topP")
_TITAN_FORM = RequestForm(
    (("textGenerationConfig", "maxTokenCount"),),
    {
        "inputText": read_text,
        "textGenerationConfig": make_members_reader("textGenerationConfig", _TITAN_CONFIG_MEMBERS),
    },
)
_TITAN_EMBED_FORM = RequestForm(
    (), {"inputText": read_text, **ignore_members("dimensions", "normalize", "embeddingTypes")}
)
_LLAMA_FORM = RequestForm(
    (("max_gen_len",),),
    {
        **ignore_members("max_gen_len", "temperature", "top_p"),
        "prompt": read_text,
        "images": lambda bound, value: bound.leave_uncounted("an image") if value else None,
    },
    (),
    ("max_gen_len", "temperature", "top_p"),
)
_COMPLETION_MEMBERS: dict[str, MemberReader] = {
    **chat_members.SAMPLING,
    **ignore_members("max_tokens"),
    "prompt": read_text,
}
_COMPLETION_FORM = RequestForm((("max_tokens",),), _COMPLETION_MEMBERS, (), ("max_tokens", *chat_members.SAMPLING))
_CHAT_MEMBERS: dict[str, MemberReader] = {
    **chat_members.SAMPLING,
    **ignore_members("max_tokens", "n"),
    "messages": chat_members.read_messages,
    "tools": chat_members.read_tools,
    "response_format": read_json,
}
_MISTRAL_FORM = RequestForm((("max_tokens",),), _CHAT_MEMBERS, ("n",), ("max_tokens", "n", *chat_members.SAMPLING))
_DEEPSEEK_FORM = RequestForm(
    (("max_tokens",), ("max_completion_tokens",)), chat_members.MEMBERS, ("n",), chat_members.ADDITIONAL_NAMES
)
_JAMBA_FORM = RequestForm(
    (("max_tokens",),),
    {**_CHAT_MEMBERS, "documents": chat_members.read_documents},
    ("n",),
    ("max_tokens", "n", *chat_members.SAMPLING),
)
_JURASSIC_FORM = RequestForm(
    (("maxTokens",),),
    {
        **ignore_members("maxTokens", "minTokens", "numResults", "temperature", "topP", "topKReturn", "stopSequences"),
        **ignore_members("countPenalty", "presencePenalty", "frequencyPenalty"),
        "prompt": read_text,
    },
    ("numResults",),
)
_COHERE_SAMPLING = ("max_tokens", "temperature", "p", "k", "stop_sequences", "seed", "stream")
_COMMAND_FORM = RequestForm(
    (("max_tokens",),),
    {
        **ignore_members(*_COHERE_SAMPLING, "num_generations", "return_likelihoods", "logit_bias", "truncate"),
        "prompt": read_text,
    },
    ("num_generations",),
)
_COMMAND_R_FORM = RequestForm(
    (("max_tokens",),),
    {
        **ignore_members(
            *_COHERE_SAMPLING, "frequency_penalty", "presence_penalty", "prompt_truncation", "return_prompt"
        ),
        **ignore_members("raw_prompting", "search_queries_only", "num_generations"),
        "message": read_text,
        "preamble": read_text,
        "chat_history": chat_members.read_history,
        "documents": chat_members.read_documents,
        "tools": chat_members.read_documents,
        "tool_results": chat_members.read_documents,
    },
    ("num_generations",),
    (*_COHERE_SAMPLING, "frequency_penalty", "presence_penalty", "num_generations"),
)
_COHERE_EMBED_FORM = RequestForm(
    (),
    {
        **ignore_members("input_type", "truncate", "embedding_types", "output_dimension", "max_tokens"),
        "texts": make_list_reader("texts", read_text),
    },
)

# Forms of what is sold by the piece: `usage.unit_usage` reads how much is asked for.
_RERANK_FORM = RequestForm(
    (),
    {
        **ignore_members("api_version", "top_n", "return_documents", "max_tokens_per_doc", "max_chunks_per_doc"),
        "query": read_text,
        "documents": read_json,
    },
    is_sold_by_piece=True,
)
_AMAZON_IMAGE_FORM = RequestForm(
    (),
    ignore_members(
        "taskType",
        "imageGenerationConfig",
        "textToImageParams",
        "imageVariationParams",
        "inPaintingParams",
        "outPaintingParams",
        "colorGuidedGenerationParams",
        "backgroundRemovalParams",
    ),
    is_sold_by_piece=True,
)

# Matches Bedrock's own ids only: an ARN of the account may stand for any model.
_TITAN_EMBED_MODEL = re.compile(r"(?:^|[./])amazon\.titan-(?:embed-text|embed-g1-text|e1t)-")


def _find_titan_form(model: str, document: Json) -> RequestForm:
    if "taskType" in document:
        return _AMAZON_IMAGE_FORM
    if "query" in document:
        return _RERANK_FORM
    return _TITAN_EMBED_FORM if _TITAN_EMBED_MODEL.search(model) else _TITAN_FORM


def _find_cohere_form(_: str, document: Json) -> RequestForm:
    """An embedding model ignores a message, and a text model does nothing without a message or prompt."""
    if "message" in document:
        return _COMMAND_R_FORM
    if "query" in document:
        return _RERANK_FORM
    return _COMMAND_FORM if "prompt" in document else _COHERE_EMBED_FORM


class RequestFamily(NamedTuple):
    """The forms of one model family's requests."""

    find_invoke_form: Callable[[str, Json], RequestForm]  # from the model's id and the body of InvokeModel
    converse_fields: RequestForm  # of Converse's additional fields


def _always(form: RequestForm) -> Callable[[str, Json], RequestForm]:
    return lambda _, __: form


def _if_messages(chat_form: RequestForm, text_form: RequestForm) -> Callable[[str, Json], RequestForm]:
    return lambda _, document: chat_form if "messages" in document else text_form


_CLAUDE_FIELDS = _CLAUDE_FORM._replace(
    caps=(*_CLAUDE_FORM.caps, ("max_tokens_to_sample",)),
    members={**claude_members.MEMBERS, **ignore_members("max_tokens_to_sample")},
)
FAMILIES: Mapping[str, RequestFamily] = {
    "anthropic": RequestFamily(_if_messages(_CLAUDE_FORM, _CLAUDE_TEXT_FORM), _CLAUDE_FIELDS),
    "nova": RequestFamily(lambda _, document: _AMAZON_IMAGE_FORM if "taskType" in document else _NOVA_FORM, _NOVA_FORM),
    "titan": RequestFamily(_find_titan_form, _TITAN_FORM),
    "llama": RequestFamily(_always(_LLAMA_FORM), _LLAMA_FORM),
    "mistral": RequestFamily(_if_messages(_MISTRAL_FORM, _COMPLETION_FORM), _MISTRAL_FORM),
    "cohere": RequestFamily(_find_cohere_form, _COMMAND_R_FORM),
    "ai21": RequestFamily(_if_messages(_JAMBA_FORM, _JURASSIC_FORM), _JAMBA_FORM),
    "deepseek": RequestFamily(_if_messages(_DEEPSEEK_FORM, _COMPLETION_FORM), _DEEPSEEK_FORM),
    "openai": RequestFamily(_always(CHAT_COMPLETIONS_FORM), CHAT_COMPLETIONS_FORM),
}


def _build_converse_form(inner_form: RequestForm) -> RequestForm:
    readers = {name: inner_form.members[name] for name in inner_form.additional_names}
    return RequestForm(
        (("inferenceConfig", "maxTokens"),),
        {
            **ignore_members("additionalModelResponseFieldPaths", "guardrailConfig", "performanceConfig"),
            **ignore_members("requestMetadata", "serviceTier"),
            "messages": converse_members.read_messages,
            "system": converse_members.read_system,
            "toolConfig": converse_members.read_tool_config,
            "inferenceConfig": converse_members.read_inference_config,
            "outputConfig": read_json,
            "promptVariables": converse_members.reject_prompt_variables,
            _ADDITIONAL_MEMBER: make_members_reader(_ADDITIONAL_MEMBER, readers),
        },
        additional_member=_ADDITIONAL_MEMBER,
        inner_form=inner_form,
    )


_CONVERSE_FORMS = {format: _build_converse_form(family.converse_fields) for format, family in FAMILIES.items()}


def find_form(operation: Operation, format: str, model: str, document: Json) -> RequestForm:
    """The form of a request. Raises InvalidRequest for a model format or prompt whose cost is unknown."""
    converse_members.reject_stored_prompt(model)
    if operation.traits.form is BodyForm.CHAT:
        return CHAT_COMPLETIONS_FORM
    if operation.traits.form is BodyForm.RESPONSES:
        return _RESPONSES_FORM
    if format not in FAMILIES:
        raise build_unbounded_error(f"a model of format {format!r}")
    if operation.traits.form is BodyForm.CONVERSE:
        return _CONVERSE_FORMS[format]
    return FAMILIES[format].find_invoke_form(model, document)
