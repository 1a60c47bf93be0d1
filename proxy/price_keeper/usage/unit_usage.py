"""What is sold by the piece: searches, images, seconds of video. Read from requests and answers. Pure.

START HERE: `read_request`, which finds the row of `UNIT_FORMS` that a request has. `UnitUsageReader` wraps the reader
of its answer and adds the quantities. Only calls of labels with such prices come here.

An answer rarely says what it used, so a request is read first: what it asks for, and whether that is certain. If it is
not, and the answer does not say either, the call counts as estimated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from price_keeper.operations import BodyForm, Operation
from price_keeper.price_dimensions import UNITS_BY_NAME
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
_SECONDS: Final = re.compile(r"([0-9]{1,6})s?")
_RESOLUTIONS: Final = ("540p", "720p")


class RequestedUnits(NamedTuple):
    """`quantities` are what the request asks for, or more. They are certain if a successful answer has used exactly
    these, and bounded if it cannot have used more."""

    quantities: Quantities
    is_certain: bool = True
    is_bounded: bool = True
    answer_members: tuple[str, ...] = ()  # members of the answer; one of them lists what was made


NO_UNITS: Final = RequestedUnits(NO_QUANTITIES)


def read_request(operation: Operation, body: bytes, sold: Iterable[str]) -> RequestedUnits:
    """What a request asks for of what its label sells by the piece. `sold` are the price dimensions of the label."""
    counters = {UNITS_BY_NAME[name].counter for name in sold}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return NO_UNITS  # Bedrock refuses it
    if not isinstance(document, dict):
        return NO_UNITS
    for form in UNIT_FORMS:
        if form.counter in counters and operation.traits.form is form.body_form:
            requested = form.read(document)
            if requested is not None:
                return requested
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
    task, config = document.get("taskType"), document.get("imageGenerationConfig") or {}
    if not isinstance(task, str) or not isinstance(config, dict):
        return None
    count = _read_count(config.get("numberOfImages", 1))
    name, is_certain = "image", False
    # An edited image keeps the size of the original, which the request does not state.
    if task in ("TEXT_IMAGE", "COLOR_GUIDED_GENERATION") or {"width", "height"} <= config.keys():
        side = max(_read_count(config.get(each, _DEFAULT_SIDE)) for each in ("width", "height"))
        quality = "premium" if config.get("quality") == "premium" else "standard"
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
    if not {"prompt", "text_prompts", "image"} & document.keys():
        return None
    return RequestedUnits({"image": _read_count(document.get("samples", 1))}, answer_members=("images", "artifacts"))


def _read_video_job(document: Json) -> RequestedUnits | None:
    """Nova Reel, and Luma's Ray."""
    given = document.get("modelInput")
    if not isinstance(given, dict):
        return None
    config = _get_object(given, "videoGenerationConfig")
    length = config.get("durationSeconds", given.get("duration"))
    stated = _SECONDS.fullmatch(str(length)) if isinstance(length, (int, str)) else None
    shots = _get_object(given, "multiShotManualParams").get("shots")
    # Which of both holds depends on the kind of task; of a task that ignores one of them, the longer is no less.
    seconds = max(int(stated[1]) if stated else 0, _SHOT_SECONDS * len(shots) if isinstance(shots, list) else 0)
    if not seconds:
        return None
    resolution = given.get("resolution")
    name = f"video_second_{resolution}" if resolution in _RESOLUTIONS else "video_second"
    return RequestedUnits({name: seconds})


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


def _get_object(document: Json, name: str) -> Json:
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def _read_count(value: Any) -> int:
    """A number that Bedrock would not accept counts as one: there is no answer to pay for."""
    return value if type(value) is int and 1 <= value <= MAX_TOKENS else 1


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
