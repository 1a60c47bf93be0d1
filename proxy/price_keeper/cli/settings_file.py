"""The settings of an org or app in a YAML or JSON file or on standard input, for `org put` and `app put`.

`locate_mistakes` adds line numbers to the mistakes that the control API reports. `LocatedSettings` is a part of a
file, such as one org of several.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from price_keeper.budgets.org_settings import format_mistake
from price_keeper.cli.api_client import ApiRefusal
from price_keeper.config.config_problems import Origin, escape_line
from price_keeper.config.config_reader import find_origin, read_leaf
from price_keeper.config.yaml_tree import MAX_CHARS, Branch, InvalidYaml, Leaf, Node, compose_tree
from price_keeper.control.api_constants import MAX_ECHOED_NAME_LENGTH
from price_keeper.errors import ConfigError


class LocatedSettings:
    """Settings at a place of a file."""

    def __init__(self, root: Node) -> None:
        self._root = root

    @property
    def body(self) -> Any:
        value = _to_value(self._root)
        return {} if value is None else value

    def list_children(self, name: str) -> list[LocatedSettings] | None:
        """The entries of the list with this name; none if it is missing, None if it is something else."""
        node = self._root.children.get(name) if isinstance(self._root, Branch) else None
        if node is None or (isinstance(node, Leaf) and node.is_null):
            return []
        if isinstance(node, Leaf) or not node.is_list:
            return None
        return [LocatedSettings(child) for child in node.children.values()]

    def format_mistake(self, path: tuple[str, ...], text: str) -> str:
        """A line for the mistake at this path below these settings."""
        return f"{find_origin(self._root, path)}: {format_mistake(path, text)}"

    @contextmanager
    def locate_mistakes(self) -> Iterator[None]:
        """Add line numbers to the mistakes that the control API reports."""
        try:
            yield
        except ApiRefusal as refused:
            if refused.status != 400:
                raise
            raise ConfigError(self._format_mistakes(refused.details)) from None

    def _format_mistakes(self, details: tuple[tuple[str, str], ...]) -> list[str]:
        mistakes = [(_resolve_path(self._root, dotted), text) for dotted, text in details]
        # In the order of the lines; messages about the whole file, such as how many more mistakes there are, come last.
        mistakes.sort(key=lambda mistake: (not mistake[0], find_origin(self._root, mistake[0]).rank))
        return [self.format_mistake(path, text) for path, text in mistakes]


class SettingsFile(LocatedSettings):
    """The parsed file. Raises ConfigError if it cannot be read or parsed."""

    def __init__(self, name: str) -> None:
        source = "standard input" if name == "-" else name
        super().__init__(_compose(_read_text(name, source), source))
        ignored = list(_iterate_ignored(self._root))
        if ignored:
            raise ConfigError([escape_line(f"{origin}: {key}: {reason}") for origin, key, reason in ignored])


def _compose(text: str, source: str) -> Node:
    try:
        return compose_tree(text, lambda line: Origin(source, line))
    except InvalidYaml as failure:
        raise ConfigError([escape_line(f"{failure.origin}: {failure}")]) from None


def _resolve_path(node: Node, dotted: str) -> tuple[str, ...]:
    """The names in a path that the API shortened and joined by dots; labels may contain dots as well."""
    if not dotted:
        return ()
    children = node.children if isinstance(node, Branch) else {}
    matching = [name for name in children if f"{dotted}.".startswith(f"{name[:MAX_ECHOED_NAME_LENGTH]}.")]
    if not matching:
        return (dotted,)
    name = max(matching, key=len)
    return (name, *_resolve_path(children[name], dotted[len(name[:MAX_ECHOED_NAME_LENGTH]) + 1 :]))


def _read_text(name: str, source: str) -> str:
    max_bytes = 4 * MAX_CHARS + 1  # enough to detect that it is too long
    try:
        if name == "-":
            return sys.stdin.buffer.read(max_bytes).decode()
        with open(name, "rb") as file:
            return file.read(max_bytes).decode()
    except UnicodeDecodeError:
        raise ConfigError([escape_line(f"{source}: not UTF-8 text")]) from None
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or "not a path"
        raise ConfigError([escape_line(f"{source}: cannot be read: {reason}")]) from None


def _iterate_ignored(node: Node) -> Iterator[tuple[Origin, str, str]]:
    if isinstance(node, Branch):
        yield from node.rejected_keys
        for child in node.children.values():
            yield from _iterate_ignored(child)


def _to_value(node: Node) -> Any:
    if isinstance(node, Branch):
        values = {name: _to_value(child) for name, child in node.children.items()}
        return list(values.values()) if node.is_list else values
    return _to_leaf_value(node)


def _to_leaf_value(leaf: Leaf) -> Any:
    """Ambiguous values stay text: 010 is eight in YAML, but its author probably meant ten."""
    if leaf.is_null:
        return None
    for python_type in {"bool": (bool,), "int": (int,), "float": (Decimal,)}.get(leaf.tag, ()):
        try:
            value = read_leaf(python_type, leaf)
        except ValueError:
            break
        return _to_json_number(value, leaf.text) if isinstance(value, Decimal) else value
    return leaf.text


def _to_json_number(value: Decimal, text: str) -> float | str:
    """A number that JSON would format differently stays text, so that a refusal quotes it as it was written."""
    number = float(value)
    return number if Decimal(repr(number)) == value else text
