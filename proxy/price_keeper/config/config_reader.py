"""Reads YAML and environment variables into frozen dataclasses, and reports every mistake at once.

The dataclasses alone define what is read:
- the type of a field: int, float, Decimal, bool, str, X | None, Literal, tuple[X, ...], Mapping[str, X], another
  dataclass, or a class with a `from_text` that raises ValueError;
- a default makes the key optional;
- `field(metadata=constraints(...))` holds the constraints on one value that its type cannot express;
- the class attribute `rules` holds functions that check fields against each other. A rule names the fields that it
  needs as its parameters and yields (path below the section, complaint). It runs if those fields could be read.

An environment variable PREFIX + PATH replaces the value at that path before the tree is read. The keys of a path are
joined by `__`, in upper or lower case; a `-` or `.` of a key may be written `_`. Entries of mappings and lists can be
replaced one by one where they exist, or all at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from price_keeper.config.config_problems import (
    MAX_SHOWN,
    ConfigPath,
    ConfigProblems,
    Origin,
    did_you_mean,
    escape_line,
    join_names,
    limit_guesses,
)
from price_keeper.config.yaml_tree import MAX_CHARS, Branch, InvalidYaml, Leaf, Node, compose_tree
from price_keeper.errors import ConfigError

T = TypeVar("T")
ValueCheck = Callable[[Any], str | None]  # the complaint about a value, None when there is none
RuleViolation = tuple[tuple[str, ...], str]  # what a rule yields

_INVALID: Final = object()  # stands for a value whose problem has been reported


def constraints(
    check: ValueCheck | None = None, *, keys: ValueCheck | None = None, private: bool = False
) -> Mapping[str, Any]:
    """Metadata of a field: a check of its value, a check of a mapping's keys, and whether to hide the value."""
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
            raw = file.read(4 * MAX_CHARS + 1)  # enough to detect that it is too long
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
    return Branch(root.origin) if is_empty else root  # an empty file is valid: variables may set every key


def _build_config_error(problem: str) -> ConfigError:
    return ConfigError([escape_line(problem)])


class _NodeReader:
    """Converts nodes to values. An invalid one is reported and becomes _INVALID; lists and mappings omit it."""

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
        # Text in the place of a section may be meant for any key in it, also a secret one: it is not shown.
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
    """The origin of the deepest node of the path that exists."""
    for name in path:
        child = node.children.get(name) if isinstance(node, Branch) else None
        if child is None:
            break
        node = child
    return node.origin


def apply_overrides(
    schema: Any, root: Branch, environ: Mapping[str, str], prefix: str, problems: ConfigProblems
) -> None:
    overrides = _OverrideApplier(schema, root, problems)
    names = [name for name in environ if name.upper().startswith(prefix)]
    for name in sorted(names, key=lambda name: (name.count("__"), name)):  # a section before the keys in it
        overrides.apply(Origin(name), name[len(prefix) :], environ[name])


class _OverrideApplier:
    def __init__(self, schema: Any, root: Branch, problems: ConfigProblems) -> None:
        self._schema, self._root, self._problems = schema, root, problems
        self._set_by: dict[str, str] = {}

    def apply(self, origin: Origin, rest: str, raw: str) -> None:
        kind, node, path = self._schema, self._root, list[str]()
        while (name := self._match_key(kind, node, rest, origin, ConfigPath().descend(path))) is not None:
            rest = rest[len(name) + 2 :]
            path.append(name)
            kind = _get_child_type(kind, name)
            if not rest:
                self._set(path, kind, origin, raw)
                break
            node = _get_branch(node, name) or Branch(origin)

    def _match_key(self, kind: Any, node: Branch, rest: str, origin: Origin, spot: ConfigPath) -> str | None:
        """The key that `rest` begins with: exactly, else ignoring case, else with `_` for `-` and `.`."""
        names = _list_keys(kind, node)
        for spelled in (str, str.upper, _to_variable_name):
            matches = [name for name in names if f"{spelled(rest)}__".startswith(f"{spelled(name)}__")]
            if len(matches) == 1:
                return matches[0]
            if matches:
                self._problems.add(origin, spot, f"ambiguous, may mean {join_names(sorted(matches))}")
                return None
        self._problems.add_unknown_key(origin, spot, rest.split("__")[0].lower(), names)
        return None

    def _set(self, path: list[str], kind: Any, origin: Origin, raw: str) -> None:
        spot = ConfigPath().descend(path)
        earlier = self._set_by.setdefault(spot.path, origin.name)
        if earlier != origin.name:
            self._problems.add(origin, spot, f"already set by {earlier}")
            return
        try:
            value = _parse_variable(kind, raw, origin)
        except InvalidYaml as error:
            self._problems.add(origin, spot, str(error))
        else:
            _ensure_section(self._root, path[:-1], origin).children[path[-1]] = value


def _to_variable_name(name: str) -> str:
    return name.upper().replace("-", "_").replace(".", "_")


def _parse_variable(kind: Any, raw: str, origin: Origin) -> Node:
    """Text is taken literally, so that it needs no YAML quotes inside shell quotes; all other values are YAML."""
    kind, is_optional = strip_optional(kind)
    if is_text(kind) and not (is_optional and raw == ""):
        return Leaf(origin, raw, "str")
    return compose_tree(raw, lambda _: origin)


def _ensure_section(node: Branch, path: list[str], origin: Origin) -> Branch:
    """The section at the end of the path; missing sections on the way are created."""
    for name in path:
        below = node.children.get(name)
        if below is None or (isinstance(below, Leaf) and below.is_null):
            node.children[name] = Branch(origin)
        node = _get_branch(node, name) or Branch(origin)  # text in its place is kept: the reader reports it
    return node


def _get_branch(node: Branch, name: str) -> Branch | None:
    below = node.children.get(name)
    return below if isinstance(below, Branch) else None


def _list_keys(kind: Any, node: Branch) -> list[str]:
    kind, _ = strip_optional(kind)
    if not has_children(kind):
        return []
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(node.children)


def _get_child_type(kind: Any, name: str) -> Any:
    kind, _ = strip_optional(kind)
    return get_type_hints(kind)[name] if dataclasses.is_dataclass(kind) else get_item_type(kind)


# No leading zeros, since YAML reads 010 as eight; bounded, since int() and Decimal() are slow on a megabyte of digits.
_INTEGER_PATTERN = r"[-+]?(0|[1-9](_?[0-9]){0,30})"
_INTEGER = re.compile(_INTEGER_PATTERN)
_NUMBER = re.compile(rf"({_INTEGER_PATTERN}(\.[0-9]{{0,30}})?|[-+]?\.[0-9]{{1,30}})([eE][-+]?[0-9]{{1,2}})?")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def strip_optional(kind: Any) -> tuple[Any, bool]:
    """The type X of `X | None`, and whether None is allowed."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    (inner,) = (arg for arg in get_args(kind) if arg is not type(None))
    return inner, True


def is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple


def is_mapping(kind: Any) -> bool:
    return get_origin(kind) in (Mapping, dict)


def has_children(kind: Any) -> bool:
    kind, _ = strip_optional(kind)
    return is_list(kind) or is_mapping(kind) or (dataclasses.is_dataclass(kind) and not hasattr(kind, "from_text"))


def is_text(kind: Any) -> bool:
    return kind is str or get_origin(kind) is Literal or hasattr(kind, "from_text")


def get_item_type(kind: Any) -> Any:
    return get_args(kind)[0 if is_list(kind) else 1]


def read_leaf(kind: Any, leaf: Leaf) -> Any:
    """The value of a leaf. Raises ValueError that says what was expected."""
    if get_origin(kind) is Literal:
        return _read_literal(get_args(kind), leaf)
    if hasattr(kind, "from_text"):
        return kind.from_text(_read_str(leaf))
    return _READERS[kind](leaf)


def _read_literal(options: tuple[Any, ...], leaf: Leaf) -> Any:
    for option in options:
        if leaf.text == str(option):
            return option
    hint = did_you_mean(leaf.text, map(str, options))
    raise ValueError(f"expected one of {join_names(options)}{f' ({hint})' if hint else ''}")


def _read_str(leaf: Leaf) -> str:
    if leaf.tag == "str":
        return leaf.text
    raise ValueError("expected text" if leaf.is_null else "expected text (put it in quotes)")


def _read_int(leaf: Leaf) -> int:
    if leaf.is_plain and _INTEGER.fullmatch(leaf.text):
        return int(leaf.text)
    raise ValueError("expected a whole number")


def _read_decimal(leaf: Leaf) -> Decimal:
    if leaf.is_plain and _NUMBER.fullmatch(leaf.text):
        return Decimal(leaf.text)
    raise ValueError("expected a number")


def _read_bool(leaf: Leaf) -> bool:
    if leaf.tag == "bool":
        return _BOOLEANS[leaf.text.lower()]
    raise ValueError("expected true or false")


_READERS: Mapping[Any, Callable[[Leaf], Any]] = {
    str: _read_str,
    int: _read_int,
    float: lambda leaf: float(_read_decimal(leaf)),  # always finite: the pattern has no inf, and bounds the exponent
    Decimal: _read_decimal,
    bool: _read_bool,
}
