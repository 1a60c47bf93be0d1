"""Text for a terminal: make it printable, measure its width in columns, pad and truncate it. Pure."""

from __future__ import annotations

import unicodedata


def make_printable(text: str) -> str:
    """Replace unprintable characters: names come from outside, and a terminal obeys control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)


def measure_width(text: str) -> int:
    """The width in columns: wide characters take two columns, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(_measure_character(letter) for letter in text)


def pad_to_width(text: str, width: int) -> str:
    return text + " " * (width - measure_width(text))


def truncate(text: str, width: int, ellipsis: str) -> str:
    """Shorten the text to the width; `ellipsis` replaces the omitted part."""
    if measure_width(text) <= width:
        return text
    while text and measure_width(text) > width - measure_width(ellipsis):
        text = text[:-1]
    return text + ellipsis


def _measure_character(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1
