"""Collects the mistakes of a configuration with their places, and formats each as one printable line.

No line repeats a value that may be a secret: not the value of an unknown key, not one under a key whose name suggests
a secret, not one of a field marked private. Also suggests the correct name for a misspelt one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice

# Keys about input and output tokens hold counts, not secrets.
_SPEAKS_OF_SECRETS = re.compile(r"secret|passw|(?<!input_)(?<!output_)token|credential|private|api_?key", re.IGNORECASE)
_NAMES_A_SECRET = re.compile(
    r"(.*[_-])?(secrets?|passwords?|passwd|token|credentials?|(private|api)[_-]?key)", re.IGNORECASE
)
_NON_ASCII = re.compile(r"[^ -~]")
MAX_SHOWN = 64  # characters of a key or a value: enough to find it, short enough for a line
MAX_LISTED = 20  # names in one line: there may be a thousand labels
MAX_REPORTED = 100  # of one configuration: the first ones are enough to work on

# A suggestion takes a millisecond or more, so the work for one untrusted body is bounded.
MAX_GUESSES = 12
MAX_COMPARED = 500  # names; after that no further suggestion is computed


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from: a line of a file or, without a line, an environment variable."""

    name: str
    line: int | None = None

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"

    @property
    def rank(self) -> tuple[bool, int, str]:
        return self.line is None, self.line or 0, self.name


@dataclass(frozen=True, slots=True)
class ConfigPath:
    """A place in the configuration: its dotted path, and whether a message may show the value there."""

    path: str = ""
    is_private: bool = False

    def child(self, name: str, private: bool = False) -> ConfigPath:
        path = f"{self.path}.{shorten_key(name)}" if self.path else shorten_key(name)
        return ConfigPath(path, self.is_private or private or _SPEAKS_OF_SECRETS.search(name) is not None)

    def unknown_child(self, name: str) -> ConfigPath:
        """The place of an unknown key. Its value is never shown; among secrets the key too may be part of one."""
        return self.child("?" if self.is_private else name)

    def descend(self, path: Iterable[str]) -> ConfigPath:
        current = self
        for name in path:
            current = current.child(name)
        return current


class ConfigProblems:
    def __init__(self) -> None:
        self._found: list[tuple[Origin, str]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, origin: Origin, spot: ConfigPath, complaint: str) -> None:
        path = f"{spot.path}: " if spot.path else ""
        self._found.append((origin, f"{origin}: {path}{complaint}"))

    def add_unknown_key(self, origin: Origin, section: ConfigPath, name: str, allowed: list[str]) -> None:
        self.add(origin, section.unknown_child(name), _explain_unknown_key(name, allowed))

    def format_lines(self) -> list[str]:
        """In the order of the file's lines, then by variable; at the end, how many more there are."""
        ordered = sorted(self._found, key=lambda found: found[0].rank)
        omitted = [f"and {len(ordered) - MAX_REPORTED} more mistakes"] * (len(ordered) > MAX_REPORTED)
        return [escape_line(text) for _, text in ordered[:MAX_REPORTED]] + omitted


@dataclass(slots=True)
class _GuessCount:
    guesses: int = 0
    compared: int = 0

    @property
    def may_guess(self) -> bool:
        return self.guesses < MAX_GUESSES and self.compared < MAX_COMPARED


_guessing: ContextVar[_GuessCount | None] = ContextVar("guessing", default=None)


@contextmanager
def limit_guesses() -> Iterator[None]:
    """Bound the suggestions for one body or one configuration: only the first unknown names get one.

    The limit is a context variable of the current task, so checks of single names need no extra parameter.
    """
    before = _guessing.set(_GuessCount())
    try:
        yield
    finally:
        _guessing.reset(before)


def find_nearest(word: str, options: Iterable[str]) -> str | None:
    """The option most similar to `word`, ignoring case; None if none is similar."""
    guessing = _guessing.get() or _GuessCount()
    if len(word) > MAX_SHOWN or not guessing.may_guess:
        return None
    by_lower = {option.lower(): option for option in islice(options, 2 * MAX_COMPARED)}
    guessing.guesses += 1
    guessing.compared += len(by_lower)
    close = get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    nearest = find_nearest(word, options)
    return f'did you mean "{nearest}"?' if nearest else ""


def join_names(names: Sequence[object]) -> str:
    return ", ".join([str(name) for name in names[:MAX_LISTED]] + ["..."] * (len(names) > MAX_LISTED))


def shorten_key(name: str) -> str:
    """A key that is safe to show. YAML reads `secret:abc`, without a space, as a key: show only `secret`."""
    word = re.match(rf"[\w.-]{{0,{MAX_SHOWN}}}", name)
    return name if word is None or word[0] == name != "" else f"{word[0]}..."


def escape_line(text: str) -> str:
    return _NON_ASCII.sub(lambda found: _escape_character(found[0]), text)


def _escape_character(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def _explain_unknown_key(name: str, allowed: list[str]) -> str:
    allowed = [shorten_key(key) for key in allowed]
    if _NAMES_A_SECRET.fullmatch(name):
        sources = [key for key in allowed if key in (f"{name}_env", f"{name}_file")]
        named = " or ".join(sources or ["a key that ends with _env or _file"])
        return f"a secret never stands in the configuration itself; name its source with {named}"
    if not allowed:
        return "unknown key; there is none here"
    return f"unknown key; {did_you_mean(shorten_key(name), allowed) or f'allowed are {join_names(allowed)}'}"
