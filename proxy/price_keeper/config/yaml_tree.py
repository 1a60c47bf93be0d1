"""Parses YAML into a tree in which every node has the line that it was written on.

No tag constructs an object, and a leaf keeps its characters: a price is read from "3.10", not from a binary float.
Size, depth and the number of nodes after the expansion of aliases are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import yaml

from price_keeper.config.config_problems import Origin

# A thousand labels fit into these bounds. The parser is slow and recursive: without bounds a wrong file could hang
# the start, and ten lines of aliases could expand to billions of nodes.
MAX_CHARS = 512 * 1024
MAX_DEPTH = 24
MAX_NODES = 30_000  # as written, and again after the expansion of aliases

_TAG_PREFIX = "tag:yaml.org,2002:"
_TAGS = {"str", "int", "float", "bool", "null", "timestamp", "value", "merge", "seq", "map"}


@dataclass(slots=True)
class Leaf:
    origin: Origin
    text: str
    tag: str  # the type that YAML resolves the text to: str, int, bool, null, ...
    is_plain: bool = True  # written without quotes

    @property
    def is_null(self) -> bool:
        return self.tag == "null"


@dataclass(slots=True)
class Branch:
    """A mapping, or a list with the keys "0", "1", ... so that paths work for lists too."""

    origin: Origin
    is_list: bool = False
    children: dict[str, Node] = field(default_factory=dict)
    rejected_keys: list[tuple[Origin, str, str]] = field(default_factory=list)  # origin, key and reason


Node = Leaf | Branch
LocateLine = Callable[[int], Origin]


class InvalidYaml(ValueError):
    """The text is not valid YAML. The message never quotes the text, which may hold a secret."""

    def __init__(self, origin: Origin, message: str) -> None:
        self.origin = origin
        super().__init__(message)


def compose_tree(text: str, locate: LocateLine) -> Node:
    """The tree of one YAML document; `locate` converts a line number of the text to an Origin."""
    if len(text) > MAX_CHARS:
        raise InvalidYaml(locate(1), f"longer than {MAX_CHARS} characters")
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        return Leaf(locate(1), "", "null") if root is None else _Converter(locate).convert(root)
    except yaml.MarkedYAMLError as error:
        raise _translate_yaml_error(error, locate) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidYaml(locate(line), "not valid YAML: a character that may not stand in YAML text") from None
    except (ValueError, OverflowError):  # PyYAML does not translate these: an escape or a %YAML version out of range
        line = loader.line + 1 if loader else 1
        raise InvalidYaml(locate(line), "not valid YAML: a number or an escape out of range") from None


class _NodeLimit:
    """Bounds the number of nodes and the depth of one pass over a text."""

    def __init__(self) -> None:
        self._nodes = 0
        self._depth = 0

    @contextmanager
    def node(self, mark: yaml.Mark) -> Iterator[None]:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _build_yaml_error(f"more than {MAX_NODES} nodes", mark)
        if self._depth > MAX_DEPTH:
            raise _build_yaml_error(f"nested more than {MAX_DEPTH} levels deep", mark)
        self._depth += 1
        yield
        self._depth -= 1


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._node_limit = _NodeLimit()

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        with self._node_limit.node(self.peek_event().start_mark):  # type: ignore[no-untyped-call]
            return super().compose_node(parent, index)


class _Converter:
    """Copies PyYAML's nodes and expands aliases, within the limit of nodes."""

    def __init__(self, locate: LocateLine) -> None:
        self._locate = locate
        self._node_limit = _NodeLimit()

    def convert(self, node: yaml.Node) -> Node:
        tag = node.tag.removeprefix(_TAG_PREFIX)
        if tag not in _TAGS:
            raise _build_yaml_error("a tag of this kind is not supported", node.start_mark)
        with self._node_limit.node(node.start_mark):
            if isinstance(node, yaml.ScalarNode):
                return Leaf(self._origin(node), node.value, tag, is_plain=node.style is None)
            return self._list(node) if isinstance(node, yaml.SequenceNode) else self._mapping(node)

    def _list(self, node: yaml.Node) -> Branch:
        items = (self.convert(item) for item in node.value)
        return Branch(self._origin(node), True, {str(index): item for index, item in enumerate(items)})

    def _mapping(self, node: yaml.Node) -> Branch:
        branch = Branch(self._origin(node))
        first_lines: dict[str, int] = {}
        for key, value in node.value:
            origin, child = self._origin(key), self.convert(value)
            name = key.value if isinstance(key, yaml.ScalarNode) and key.value != "<<" else ""
            reason = _explain_rejected_key(key, first_lines.get(name))
            if reason:
                branch.rejected_keys.append((origin, name, reason))
                continue
            if isinstance(child, Branch):
                child.origin = origin  # the origin of a section is that of its key, not that of its first entry
            first_lines[name] = key.start_mark.line + 1
            branch.children[name] = child
        return branch

    def _origin(self, node: yaml.Node) -> Origin:
        return self._locate(node.start_mark.line + 1)


def _explain_rejected_key(key: yaml.Node, first_line: int | None) -> str | None:
    if key.tag == _TAG_PREFIX + "merge":
        return "merge keys are not supported; repeat the keys, or name a whole section by an alias"
    if not isinstance(key, yaml.ScalarNode) or key.tag != _TAG_PREFIX + "str":
        return "a key must be text; put it in quotes"
    return None if first_line is None else f"duplicate key, first on line {first_line}"


def _build_yaml_error(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, mark)


def _translate_yaml_error(error: yaml.MarkedYAMLError, locate: LocateLine) -> InvalidYaml:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    problem = error.problem or "it cannot be read"
    if error.context:
        problem = f"{error.context}{_describe_start(error.context_mark, line)}, {problem}"
    return InvalidYaml(locate(line), f"not valid YAML at column {column}: {_redact_quotations(problem)}")


def _describe_start(mark: yaml.Mark | None, line: int) -> str:
    return f" that begins on line {mark.line + 1}" if mark and mark.line + 1 != line else ""


def _redact_quotations(problem: str) -> str:
    """PyYAML quotes characters and its own <tokens>, but also names: `password: *hunter2` must not be shown."""
    return re.sub(r"'([^']*)'", lambda quoted: quoted[0] if _is_harmless(quoted[1]) else "'...'", problem)


def _is_harmless(quoted: str) -> bool:
    return len(quoted) < 2 or quoted.startswith("<")
