"""What of a text a terminal may be given, and how wide it is there. Pure."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Names come from outside, and a terminal obeys what is not printable."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def width_of(text: str) -> int:
    """In columns: some letters take two of them, marks that are set upon a letter none."""
    if text.isascii():
        return len(text)
    return sum(_letter_width(letter) for letter in text)


def padded(text: str, width: int) -> str:
    return text + " " * (width - width_of(text))


def cut(text: str, width: int, sign: str) -> str:
    """`sign` stands for what is left out."""
    if width_of(text) <= width:
        return text
    while text and width_of(text) > width - width_of(sign):
        text = text[:-1]
    return text + sign


def _letter_width(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1
