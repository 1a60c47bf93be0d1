"""From a path to its routes: by what stands in it where no name does, so that few are looked at for each request."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from price_keeper.control.calls import ApiRoute
from price_keeper.control.problems import ERRORS, Problem, not_found

MOST_SEGMENTS = 16

_Fixed = tuple[str, ...]
_Names = list[tuple[int, str]]


class _Shape:
    """Routes of one length that have their names at the same places."""

    def __init__(self, segments: Sequence[str]) -> None:
        self._fixed = [place for place, segment in enumerate(segments) if not _is_name(segment)]
        self._routes: dict[_Fixed, list[tuple[ApiRoute, _Names]]] = {}

    def __len__(self) -> int:
        return len(self._fixed)

    def add(self, route: ApiRoute, segments: Sequence[str]) -> None:
        names = [(place, segment[1:-1]) for place, segment in enumerate(segments) if _is_name(segment)]
        self._routes.setdefault(self._of(segments), []).append((route, names))

    def of(self, path: Sequence[str]) -> Sequence[tuple[ApiRoute, _Names]]:
        return self._routes.get(self._of(path), ())

    def _of(self, path: Sequence[str]) -> _Fixed:
        return tuple([path[place] for place in self._fixed])


class Routing:
    """A word goes before a name that stands at its place."""

    def __init__(self, routes: Sequence[ApiRoute]) -> None:
        found: dict[tuple[bool, ...], _Shape] = {}
        for route in routes:
            segments = route.segments
            assert len(segments) <= MOST_SEGMENTS
            found.setdefault(tuple(map(_is_name, segments)), _Shape(segments)).add(route, segments)
        self._shapes: dict[int, list[_Shape]] = {}
        for names, shape in sorted(found.items(), key=lambda each: -len(each[1])):
            self._shapes.setdefault(len(names), []).append(shape)

    def found(self, method: str, raw_path: str) -> tuple[ApiRoute, dict[str, str]]:
        """With what stands in the places of names. Raises Problem."""
        path = raw_path.split("/", MOST_SEGMENTS)[1:]
        others: list[ApiRoute] = []
        for shape in self._shapes.get(len(path), ()):
            for route, names in shape.of(path):
                values = _named(names, path)
                if values is not None and route.accepts_method(method):
                    return route, values
                if values is not None:
                    others.append(route)
        if not others:
            raise not_found("there is nothing here")
        allowed = {"Allow": ", ".join(sorted({route.method for route in others}))}
        raise Problem(405, ERRORS[405], f"only {allowed['Allow']} can be asked for here", headers=allowed)


def _is_name(segment: str) -> bool:
    return segment.startswith("{")


def _named(names: _Names, path: Sequence[str]) -> dict[str, str] | None:
    """What is no text stands for nothing that there is."""
    try:
        return {name: unquote_to_bytes(path[place]).decode() for place, name in names}
    except UnicodeDecodeError:
        return None
