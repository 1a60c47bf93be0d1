"""Reads YAML and environment overrides into frozen dataclasses, and reports every mistake at once.

The shape is in the dataclasses alone:
- a field's type says what is read: int, float, Decimal, bool, str, X | None, Literal, tuple[X, ...],
  Mapping[str, X], a nested dataclass, or any class with a `from_text` that raises ValueError;
- a field's default makes its key optional;
- `field(metadata=reads(...))` carries what the type cannot say about one value;
- the class attribute `rules` carries what must hold between fields: functions that ask for fields by the names of
  their parameters and yield (path below the section, complaint). A rule runs when what it asks for could be read.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

from price_keeper.config.kinds import get_item_type, has_children, is_list, read_leaf, strip_optional
from price_keeper.config.overrides import apply_overrides
from price_keeper.config.problems import MAX_SHOWN, ConfigPath, ConfigProblems, Origin, escape_line, limit_guesses
from price_keeper.config.tree import MAX_CHARS, Branch, InvalidYaml, Leaf, Node, compose_tree
from price_keeper.errors import ConfigError

T = TypeVar("T")
ValueCheck = Callable[[Any], str | None]  # the complaint about a value, None when there is none
RuleViolation = tuple[tuple[str, ...], str]  # what a rule yields

_INVALID: Final = object()  # stands for a value whose problem has been reported


def constraints(
    check: ValueCheck | None = None, *, keys: ValueCheck | None = None, private: bool = False
) -> Mapping[str, Any]:
    """Metadata of a field: a check of its value, one of a mapping's keys, and whether problems may show the value."""
    return {"check": check, "keys": keys, "private": private}


def read_file(schema: type[T], path: Path, environ: Mapping[str, str], prefix: str) -> T:
    return read_text(schema, read_config_file(path), str(path), environ, prefix)


def read_text(schema: type[T], text: str, source: str, environ: Mapping[str, str], prefix: str) -> T:
    """`source` names the text in problems; variables that begin with `prefix` override its keys."""
    problems = ConfigProblems()
    root = _compose_tree(text, source)
    with limit_guesses():
        if isinstance(root, Branch):
            apply_overrides(schema, root, environ, prefix, problems)
        value: T = _NodeReader(problems).read(schema, root, ConfigPath())
    if problems:
        raise ConfigError(problems.format_lines())
    return value


def read_config_file(path: Path) -> str:
    """Raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(4 * MAX_CHARS + 1)  # enough to see that it is too long, however long it is
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _build_config_error(f"{path}:{line}: not UTF-8 text") from None
    except OSError as error:
        raise _build_config_error(f"{path}: cannot be read: {error.strerror or type(error).__name__}") from None
    except ValueError:  # a NUL in the path
        raise _build_config_error(f"{path}: cannot be read: not a path") from None


def _compose_tree(text: str, source: str) -> Node:
    try:
        root = compose_tree(text, lambda line: Origin(source, line))
    except InvalidYaml as error:
        raise _build_config_error(f"{error.origin}: {error}") from None
    is_empty = isinstance(root, Leaf) and root.is_null
    return Branch(root.origin) if is_empty else root  # all of it may come from the environment


def _build_config_error(problem: str) -> ConfigError:
    return ConfigError([escape_line(problem)])


class _NodeReader:
    """From nodes to values. What cannot be read is reported and becomes _BROKEN; lists and mappings keep the rest."""

    def __init__(self, problems: ConfigProblems) -> None:
        self._problems = problems

    def read(self, kind: Any, node: Node, spot: ConfigPath, keys: ValueCheck | None = None) -> Any:
        kind, is_optional = strip_optional(kind)
        if is_optional and isinstance(node, Leaf) and node.is_null:
            return None
        if not has_children(kind):
            return self._leaf(kind, node, spot)
        if isinstance(node, Leaf) or node.is_list is not is_list(kind):
            return self._not_a_branch(kind, node, spot)
        for origin, name, reason in node.rejected_keys:
            self._problems.add(origin, spot.unknown_child(name) if name else spot, reason)
        if dataclasses.is_dataclass(kind):
            return self._section(kind, node, spot)
        return self._list(kind, node, spot) if is_list(kind) else self._mapping(kind, node, spot, keys)

    def _leaf(self, kind: Any, node: Node, spot: ConfigPath) -> Any:
        if isinstance(node, Branch):
            return self._report_problem(node, spot, f"expected a single value, found {_describe_node(node, spot)}")
        try:
            return read_leaf(kind, node)
        except ValueError as error:
            return self._report_problem(node, spot, f"{error}, found {_describe_node(node, spot)}")

    def _not_a_branch(self, kind: Any, node: Node, spot: ConfigPath) -> Any:
        # Text that stands where a section belongs may have been meant for any key in it: it is not shown.
        hidden = dataclasses.replace(spot, is_private=True)
        expected = "a list" if is_list(kind) else "a mapping"
        return self._report_problem(node, spot, f"expected {expected}, found {_describe_node(node, hidden)}")

    def _section(self, schema: Any, node: Branch, spot: ConfigPath) -> Any:
        fields = {field.name: field for field in dataclasses.fields(schema)}
        for name, child in node.children.items():
            if name not in fields:
                self._problems.add_unknown_key(child.origin, spot, name, list(fields))
        kinds = get_type_hints(schema)
        values = {name: self._field(field, kinds[name], node, spot) for name, field in fields.items()}
        self._apply_rules(schema, values, node, spot)
        return _INVALID if any(value is _INVALID for value in values.values()) else schema(**values)

    def _field(self, field: dataclasses.Field[Any], kind: Any, section: Branch, spot: ConfigPath) -> Any:
        spot = spot.child(field.name, private=field.metadata.get("private", False))
        node = section.children.get(field.name)
        if node is None:
            return self._default(field, section, spot)
        problems_before = len(self._problems)
        value = self.read(kind, node, spot, field.metadata.get("keys"))
        check = field.metadata.get("check")
        is_sound = value is not None and len(self._problems) == problems_before
        complaint = check(value) if check and is_sound else None
        if complaint is None:
            return value
        found = f", found {_describe_node(node, spot)}" if isinstance(node, Leaf) else ""
        return self._report_problem(node, spot, f"{complaint}{found}")

    def _default(self, field: dataclasses.Field[Any], section: Branch, spot: ConfigPath) -> Any:
        if field.default is not dataclasses.MISSING:
            return field.default
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        self._problems.add(section.origin, spot, "required, but missing")
        return _INVALID

    def _apply_rules(self, schema: Any, values: dict[str, Any], node: Branch, spot: ConfigPath) -> None:
        for rule in getattr(schema, "rules", ()):
            arguments = {name: values[name] for name in inspect.signature(rule).parameters}
            if any(value is _INVALID for value in arguments.values()):
                continue
            for path, complaint in rule(**arguments):
                self._problems.add(find_origin(node, path), spot.descend(path), complaint)

    def _list(self, kind: Any, node: Branch, spot: ConfigPath) -> tuple[Any, ...]:
        items = [self.read(get_item_type(kind), child, spot.child(name)) for name, child in node.children.items()]
        return tuple(item for item in items if item is not _INVALID)

    def _mapping(self, kind: Any, node: Branch, spot: ConfigPath, keys: ValueCheck | None) -> Mapping[Any, Any]:
        read = {}
        for name, child in node.children.items():
            self._check_key(get_args(kind)[0], name, child.origin, spot, keys)
            read[name] = self.read(get_item_type(kind), child, spot.child(name))
        return types.MappingProxyType({name: value for name, value in read.items() if value is not _INVALID})

    def _check_key(self, kind: Any, name: str, origin: Origin, spot: ConfigPath, check: ValueCheck | None) -> None:
        try:
            key = read_leaf(kind, Leaf(origin, name, "str"))
            complaint = check(key) if check else None
        except ValueError as error:
            complaint = str(error)
        if complaint:
            self._problems.add(origin, spot.child(name), complaint)

    def _report_problem(self, node: Node, spot: ConfigPath, complaint: str) -> Any:
        self._problems.add(node.origin, spot, complaint)
        return _INVALID


def _describe_node(node: Node, spot: ConfigPath) -> str:
    if isinstance(node, Branch):
        return "a list" if node.is_list else "a mapping"
    if spot.is_private:
        return {"null": "null", "str": "text", "int": "a number", "float": "a number"}.get(node.tag, "another value")
    shown = node.text if len(node.text) <= MAX_SHOWN else f"{node.text[:MAX_SHOWN]}..."
    return f'"{shown}"' if node.tag == "str" else shown or "null"


def find_origin(node: Node, path: tuple[str, ...]) -> Origin:
    """Where the deepest part of the path that was written stands."""
    for name in path:
        child = node.children.get(name) if isinstance(node, Branch) else None
        if child is None:
            break
        node = child
    return node.origin
