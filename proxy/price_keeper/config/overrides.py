"""Puts the value of each variable PREFIX + path into the tree, as if it had been written there.

A path is the keys joined by `__`, in upper or lower case; a `-` or `.` in a key may be written `_`. The entries of
a mapping and the items of a list (0, 1, ...) can be overridden where they exist, or the whole at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from price_keeper.config.kinds import get_item_type, has_children, is_text, strip_optional
from price_keeper.config.problems import ConfigPath, ConfigProblems, Origin, join_names
from price_keeper.config.tree import Branch, InvalidYaml, Leaf, Node, compose_tree


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
        """The key that `rest` begins with: as spelled, else in any case, else with `_` for `-` and `.`."""
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
    """Text is taken as it stands, so that nobody has to quote it twice; all else is YAML."""
    kind, is_optional = strip_optional(kind)
    if is_text(kind) and not (is_optional and raw == ""):
        return Leaf(origin, raw, "str")
    return compose_tree(raw, lambda _: origin)


def _ensure_section(node: Branch, path: list[str], origin: Origin) -> Branch:
    """The section at the end of the path, with those on the way that nobody has written yet."""
    for name in path:
        below = node.children.get(name)
        if below is None or (isinstance(below, Leaf) and below.is_null):
            node.children[name] = Branch(origin)
        node = _get_branch(node, name) or Branch(origin)  # text in its place stays: the reader reports it
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
