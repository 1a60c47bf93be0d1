"""The text of a simulated model: words chosen by a hash, each exactly one token. Pure."""

from __future__ import annotations

from hashlib import sha256

_WORDS = tuple(
    word
    for line in (
        "the and you all any can her was one our out day get has him his how man new now old see two way who boy did",
        "its let put say she too use air big box cat cup dog ear eye far few fly fun hat ice ink job key leg map net",
        "oak pen red run sea sky sun tea",
    )
    for word in line.split()
)

_TOKEN_BYTES = 4  # a word and the space after it
_TEXT_WORDS = 4096
_OPENING_WORDS = 8  # enough that two responses almost never begin alike


def _build_text(length: int) -> str:
    material = b"".join(sha256(index.to_bytes(4, "big")).digest() for index in range(length // 32))
    return _spell_words(material)


def _spell_words(material: bytes) -> str:
    return "".join(f"{_WORDS[byte % len(_WORDS)]} " for byte in material)


_TEXT = _build_text(_TEXT_WORDS)


def generate_words(seed: bytes, tokens: int) -> str:
    """`tokens` words that depend only on the seed; a longer text begins with the shorter one."""
    if tokens == 0:
        return ""
    start = int.from_bytes(seed[:4], "big") % _TEXT_WORDS
    rounds = 2 + tokens // _TEXT_WORDS
    text = _spell_words(seed[4 : 4 + _OPENING_WORDS]) + (_TEXT * rounds)[_TOKEN_BYTES * start :]
    return text[: _TOKEN_BYTES * tokens - 1]


def split_text(text: str, tokens_per_piece: int) -> list[str]:
    """The text split as in a stream; at least one piece, which may be empty."""
    size = _TOKEN_BYTES * tokens_per_piece
    return [text[start : start + size] for start in range(0, len(text), size)] or [""]
