"""What is estimated of an answer in one piece that tells no usage: text by its length, images by their number."""

from __future__ import annotations

import json
from base64 import b64encode

import pytest
from price_keeper.operations import Operation
from price_keeper.usage.stream_usage import BYTES_PER_TOKEN
from price_keeper.usage.usage_reader import MAX_BUFFERED_BYTES, TOKENS_PER_IMAGE, build_reader

IMAGE = b64encode(bytes(range(256)) * 4096).decode()
TEXT = "not a word of this is an image, or a sound. " * 100


def estimated(answer: bytes, size: int = 65_536) -> int | None:
    reader = build_reader(Operation.INVOKE, "nova", b"application/json", {})
    for at in range(0, len(answer), size):
        reader.feed(answer[at : at + size])
    assert reader.usage() is None
    return reader.estimate_output()


@pytest.mark.parametrize(
    ("document", "images"),
    [
        ({"images": [IMAGE]}, 1),
        ({"images": [IMAGE, IMAGE, IMAGE], "error": None}, 3),
        ({"artifacts": [{"base64": IMAGE.replace("/", "_").replace("+", "-"), "finishReason": "SUCCESS"}]}, 1),
        ({"url": f"data:image/png;base64,{IMAGE}"}, 1),
    ],
)
def test_image_is_estimated_as_image(document: object, images: int) -> None:
    assert estimated(json.dumps(document).encode()) == pytest.approx(images * TOKENS_PER_IMAGE, abs=30)


def test_text_is_estimated_by_length() -> None:
    for text in (TEXT, "a" * 999, json.dumps([0.125] * 1024)):
        answer = json.dumps({"text": text}).encode()
        assert estimated(answer) == len(answer) // BYTES_PER_TOKEN


def test_text_and_images_are_both_estimated() -> None:
    answer = json.dumps({"text": TEXT, "images": [IMAGE]}).encode()
    assert estimated(answer) == pytest.approx(len(TEXT) // BYTES_PER_TOKEN + TOKENS_PER_IMAGE, abs=30)


def test_truncated_image_counts_as_one() -> None:
    answer = json.dumps({"images": [IMAGE]}).encode()[:500_000]
    assert estimated(answer) == pytest.approx(TOKENS_PER_IMAGE, abs=30)


def test_oversized_response_gives_no_estimate() -> None:
    assert estimated(b'"' + b"a" * MAX_BUFFERED_BYTES, 1024 * 1024) is None
