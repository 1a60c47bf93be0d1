"""Names that sort by when they were made: 48 bits of milliseconds and 80 of chance, in 26 characters. Pure."""

from __future__ import annotations

from collections.abc import Callable

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_CHANCE_BITS = 80
_LENGTH = 26


class Ulids:
    """Each is greater than the one before, and than `after`, even if the clock stands still or goes back."""

    def __init__(self, now: Callable[[], float], chance: Callable[[int], bytes], after: str = "") -> None:
        self.now = now
        self._chance = chance
        self._last = _millis(after) if after else 0

    def new(self) -> str:
        self._last = max(int(self.now() * 1000), self._last + 1)
        return _text(self._last << _CHANCE_BITS | int.from_bytes(self._chance(_CHANCE_BITS // 8)))


def made_at(ulid: str) -> float:
    """In epoch seconds."""
    return _millis(ulid) / 1000


def is_ulid(text: str) -> bool:
    return len(text) == _LENGTH and text[0] in "01234567" and all(character in _ALPHABET for character in text)


def _millis(ulid: str) -> int:
    number = 0
    for character in ulid:
        number = number << 5 | _ALPHABET.index(character)
    return number >> _CHANCE_BITS


def _text(number: int) -> str:
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(5 * (_LENGTH - 1), -1, -5))
