"""ULIDs: names that sort by creation time, of 48 bits of milliseconds and 80 random bits in 26 characters. Pure."""

from __future__ import annotations

from collections.abc import Callable

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_RANDOM_BITS = 80
_LENGTH = 26


class UlidFactory:
    """Each ULID is greater than the one before, and than `after`, even if the clock stands still or goes back."""

    def __init__(self, now: Callable[[], float], random_bytes: Callable[[int], bytes], after: str = "") -> None:
        self.now = now
        self._random_bytes = random_bytes
        self._last_millis = _parse_millis(after) if after else 0

    def new(self) -> str:
        self._last_millis = max(int(self.now() * 1000), self._last_millis + 1)
        return _encode(self._last_millis << _RANDOM_BITS | int.from_bytes(self._random_bytes(_RANDOM_BITS // 8)))


def read_created_at(ulid: str) -> float:
    """The creation time in epoch seconds."""
    return _parse_millis(ulid) / 1000


def is_ulid(text: str) -> bool:
    return len(text) == _LENGTH and text[0] in "01234567" and all(character in _ALPHABET for character in text)


def _parse_millis(ulid: str) -> int:
    number = 0
    for character in ulid:
        number = number << 5 | _ALPHABET.index(character)
    return number >> _RANDOM_BITS


def _encode(number: int) -> str:
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(5 * (_LENGTH - 1), -1, -5))
