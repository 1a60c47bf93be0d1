"""What is sold by the piece: searches, images, seconds of video. Read from requests and answers. Pure.

START HERE: `read_request`, which finds the row of `UNIT_FORMS` that a request has. `UnitUsageReader` wraps the reader
of its answer and adds the quantities. Only calls of labels with such prices come here.

An answer rarely says what it used, so a request is read first: what it asks for, and whether that is certain. If it is
not, and the answer does not say either, the call counts as estimated. A request that states a number, size or length in
a way that is not understood is refused: it could cost more than what is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from price_keeper.errors import InvalidRequest
from price_keeper.operations import BodyForm, Operation
from price_keeper.price_dimensions import UNITS, UNITS_BY_NAME
from price_keeper.usage.model_families import MAX_TOKENS
from price_keeper.usage.token_usage import Usage
from price_keeper.usage.usage_reader import BodyBuffer, UsageReader

Json = Mapping[str, Any]
Quantities = Mapping[str, int]

NO_QUANTITIES: Final[Quantities] = MappingProxyType({})

DOCUMENTS_PER_SEARCH: Final = 100
# A longer document is counted as several, each with the query. A token has at least one byte.
TOKENS_PER_DOCUMENT: Final = 500  # Cohere's limit; Amazon's is 512
_SHOT_SECONDS: Final = 6  # of a video of several shots, whose length follows from their number
_DEFAULT_SIDE: Final = 1024
_DIGITS: Final = re.compile(r"([0-9]{1,9})s?")  # a number of seconds may end with "s"
_QUALITIES: Final = ("standard", "premium")
_RESOLUTIONS: Final = ("540p", "720p")
_GENERAL_NAMES: Final = {each.counter: each.name for each in UNITS if not each.general}


class RequestedUnits(NamedTuple):
    """`quantities` are what the request asks for, or more. They are certain if a successful answer has used exactly
    these, and bounded if it cannot have used more."""

    quantities: Quantities
    is_certain: bool = True
    is_bounded: bool = True
    answer_members: tuple[str, ...] = ()  # members of the answer; one of them lists what was made


NO_UNITS: Final = RequestedUnits(NO_QUANTITIES)


def read_request(
    operation: Operation, body: bytes, sold: Iterable[str], *, are_tokens_free: bool = False
) -> RequestedUnits:
    """What a request asks for of what its label sells by the piece. `sold` are the price dimensions of the label. A
    request in none of the known forms asks for one piece of unknown kind if its tokens are free, else for none. Raises
    InvalidRequest."""
    counters = {UNITS_BY_NAME[name].counter for name in sold}
    forms = [form for form in UNIT_FORMS if form.counter in counters and operation.traits.form is form.body_form]
    if not forms:
        return NO_UNITS
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as failure:
        raise InvalidRequest(f"this model is sold by the piece, and the body is no JSON: {failure.msg}") from None
    if not isinstance(document, dict):
        raise InvalidRequest("this model is sold by the piece, and the body is no JSON object")
    for form in forms:
        requested = form.read(document)
        if requested is not None:
            return requested
    if are_tokens_free:
        return RequestedUnits({_GENERAL_NAMES[forms[0].counter]: 1}, is_certain=False, is_bounded=False)
    return NO_UNITS


# ---------------------------------------------------------------- forms of requests


def _read_rerank(document: Json) -> RequestedUnits | None:
    query, documents = document.get("query"), document.get("documents")
    if not isinstance(query, str) or not isinstance(documents, list):
        return None
    query_bytes = len(query.encode())
    room = TOKENS_PER_DOCUMENT - query_bytes
    sizes = [len(each.encode()) if isinstance(each, str) else len(orjson.dumps(each)) for each in documents]
    is_certain = all(size <= room for size in sizes)
    # Of a long query at most half of the room is known to be used.
    room = max(room, TOKENS_PER_DOCUMENT // 2)
    count = sum(max(1, -(-size // room)) for size in sizes)
    searches = max(1, -(-count // DOCUMENTS_PER_SEARCH))
    is_bounded = query_bytes <= TOKENS_PER_DOCUMENT // 2
    return RequestedUnits({"search_unit": searches}, is_certain or (searches == 1 and is_bounded), is_bounded)


def _read_amazon_image(document: Json) -> RequestedUnits | None:
    """Titan Image Generator and Nova Canvas."""
    task = document.get("taskType")
    if not isinstance(task, str):
        return None
    config = _read_object(document, "imageGenerationConfig")
    count = _read_number(config, "numberOfImages", 1)
    quality = _read_name(config, "quality", _QUALITIES) or "standard"
    name, is_certain = "image", False
    # An edited image keeps the size of the original, which the request does not state.
    if task in ("TEXT_IMAGE", "COLOR_GUIDED_GENERATION") or {"width", "height"} <= config.keys():
        side = max(_read_number(config, each, _DEFAULT_SIDE) for each in ("width", "height"))
        name = next((f"image_{most}_{quality}" for most in (512, 1024, 2048) if side <= most), "image")
        is_certain = True
    return RequestedUnits({name: count}, is_certain, answer_members=("images",))


def _read_embedded_image(document: Json) -> RequestedUnits | None:
    """Titan's embeddings of an image."""
    if "inputImage" not in document and "inputText" not in document:
        return None
    return RequestedUnits({"image": 1}) if document.get("inputImage") else NO_UNITS


def _read_stability_image(document: Json) -> RequestedUnits | None:
    """Stable Diffusion and Stable Image, which have one price for all sizes."""
    if not {"prompt", "text_prompts", "image", "init_image"} & document.keys():
        return None
    return RequestedUnits({"image": _read_number(document, "samples", 1)}, answer_members=("images", "artifacts"))


def _read_video_job(document: Json) -> RequestedUnits | None:
    """Nova Reel, and Luma's Ray."""
    given = _read_object(document, "modelInput")
    shots = _read_object(given, "multiShotManualParams").get("shots", [])
    if not isinstance(shots, list):
        raise InvalidRequest("shots is a list, or left out")
    # Which of these holds depends on the kind of task; of a task that ignores some of them, the longest is no less.
    seconds = max(
        _read_number(_read_object(given, "videoGenerationConfig"), "durationSeconds", 0),
        _read_number(given, "duration", 0),
        _SHOT_SECONDS * len(shots),
    )
    if not seconds:
        return None
    resolution = _read_name(given, "resolution", _RESOLUTIONS)
    return RequestedUnits({f"video_second_{resolution}" if resolution else "video_second": seconds})


class UnitForm(NamedTuple):
    """A way in which requests state units. The first row whose reader knows the request holds."""

    counter: str  # that labels with a price of one of its dimensions count
    body_form: BodyForm
    read: Callable[[Json], RequestedUnits | None]


UNIT_FORMS: Final = (
    UnitForm("search_units", BodyForm.INVOKE, _read_rerank),
    UnitForm("images", BodyForm.INVOKE, _read_amazon_image),
    UnitForm("images", BodyForm.INVOKE, _read_embedded_image),
    UnitForm("images", BodyForm.INVOKE, _read_stability_image),
    UnitForm("video_seconds", BodyForm.JOB, _read_video_job),
)


def _read_object(document: Json, name: str) -> Json:
    value = document.get(name, {})
    if isinstance(value, dict):
        return value
    raise InvalidRequest(f"{name} is an object, or left out")


def _read_name(document: Json, name: str, allowed: Collection[str]) -> str:
    """One of the allowed names; empty if it is left out."""
    if name not in document:
        return ""
    value = document[name]
    if isinstance(value, str) and value in allowed:
        return value
    raise InvalidRequest(f"{name} is one of {', '.join(allowed)}, or left out")


def _read_number(document: Json, name: str, default: int) -> int:
    """A whole number, also one that is written as a float or as text; `default` if it is left out."""
    if name not in document:
        return default
    value = document[name]
    if isinstance(value, str) and (digits := _DIGITS.fullmatch(value)):
        value = int(digits[1])
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is int and 1 <= value <= MAX_TOKENS:
        return value
    raise InvalidRequest(f"{name} is a whole number of 1 to {MAX_TOKENS}, or left out")


# ---------------------------------------------------------------- answers


class _Answer(msgspec.Struct, gc=False):
    """The members that say how much was made. Their content, such as images, is not decoded."""

    images: list[msgspec.Raw] | None = None
    artifacts: list[msgspec.Raw] | None = None
    meta: Any = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def read_answer(body: bytes, requested: RequestedUnits) -> Quantities | None:
    """What an answer used; None if neither it nor its request says that with certainty."""
    try:
        answer = _decode_answer(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    billed = answer.meta.get("billed_units") if isinstance(answer.meta, dict) else None
    searches = billed.get("search_units") if isinstance(billed, dict) else None
    if type(searches) is int and 0 < searches <= MAX_TOKENS and "search_unit" in requested.quantities:
        return {"search_unit": searches}
    if not requested.is_certain:
        return None
    lists = [getattr(answer, name) for name in requested.answer_members]
    if not lists:
        return requested.quantities
    count = sum(len(each) for each in lists if each is not None)
    return dict.fromkeys(requested.quantities, count) if count else None


class UnitUsageReader:
    """Adds what was requested and made to the usage that another reader reads."""

    __slots__ = ("_body", "_reader", "_requested")

    def __init__(self, reader: UsageReader, requested: RequestedUnits) -> None:
        self._reader = reader
        self._requested = requested
        self._body = BodyBuffer()

    def feed(self, data: bytes) -> None:
        self._reader.feed(data)
        self._body.feed(data)

    def usage(self) -> Usage | None:
        quantities = self._read_quantities()
        if quantities is None:
            return None
        return self._read_tokens()._replace(quantities=quantities)

    def partial_usage(self) -> Usage | None:
        return self._read_tokens()._replace(quantities=self._read_quantities() or self._requested.quantities)

    def estimate_output(self) -> int | None:
        return 0  # what is sold by the piece here is no text

    def has_output(self) -> bool:
        return self._reader.has_output()

    @property
    def has_failed(self) -> bool:
        return self._reader.has_failed

    def _read_tokens(self) -> Usage:
        return self._reader.usage() or self._reader.partial_usage() or Usage()

    def _read_quantities(self) -> Quantities | None:
        if self._body.is_too_large:
            return self._requested.quantities if self._requested.is_certain else None
        return read_answer(self._body.to_bytes(), self._requested)
