"""Find the route of a method and a path. A fixed segment of a path takes precedence over a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from price_keeper.control.api_errors import ERROR_CODES, ApiError, not_found
from price_keeper.control.api_types import ApiRoute

MAX_SEGMENTS = 16

_FixedSegments = tuple[str, ...]
_Parameters = list[tuple[int, str]]


class _PathPattern:
    """Routes of the same length with parameters at the same positions."""

    def __init__(self, segments: Sequence[str]) -> None:
        self._fixed_positions = [place for place, segment in enumerate(segments) if not _is_parameter(segment)]
        self._routes: dict[_FixedSegments, list[tuple[ApiRoute, _Parameters]]] = {}

    def __len__(self) -> int:
        return len(self._fixed_positions)

    def add(self, route: ApiRoute, segments: Sequence[str]) -> None:
        parameters = [(place, segment[1:-1]) for place, segment in enumerate(segments) if _is_parameter(segment)]
        self._routes.setdefault(self._get_fixed_segments(segments), []).append((route, parameters))

    def get_candidates(self, path: Sequence[str]) -> Sequence[tuple[ApiRoute, _Parameters]]:
        return self._routes.get(self._get_fixed_segments(path), ())

    def _get_fixed_segments(self, path: Sequence[str]) -> _FixedSegments:
        return tuple([path[place] for place in self._fixed_positions])


class Router:
    """An index of routes by the positions of their parameters; more fixed segments are tried first."""

    def __init__(self, routes: Sequence[ApiRoute]) -> None:
        patterns: dict[tuple[bool, ...], _PathPattern] = {}
        for route in routes:
            segments = route.segments
            assert len(segments) <= MAX_SEGMENTS
            patterns.setdefault(tuple(map(_is_parameter, segments)), _PathPattern(segments)).add(route, segments)
        self._patterns: dict[int, list[_PathPattern]] = {}
        for names, pattern in sorted(patterns.items(), key=lambda each: -len(each[1])):
            self._patterns.setdefault(len(names), []).append(pattern)

    def match(self, method: str, raw_path: str) -> tuple[ApiRoute, dict[str, str]]:
        """The route, and the values of its path parameters. Raises ApiError: 404, or 405 with the allowed methods."""
        path = raw_path.split("/", MAX_SEGMENTS)[1:]
        other_methods: list[ApiRoute] = []
        for pattern in self._patterns.get(len(path), ()):
            for route, names in pattern.get_candidates(path):
                values = _decode_parameters(names, path)
                if values is not None and route.accepts_method(method):
                    return route, values
                if values is not None:
                    other_methods.append(route)
        if not other_methods:
            raise not_found("there is no such path")
        allowed = {"Allow": ", ".join(sorted({route.method for route in other_methods}))}
        raise ApiError(405, ERROR_CODES[405], f"this path serves only {allowed['Allow']}", headers=allowed)


def _is_parameter(segment: str) -> bool:
    return segment.startswith("{")


def _decode_parameters(parameters: _Parameters, path: Sequence[str]) -> dict[str, str] | None:
    """The decoded path parameters; None if one is not UTF-8, which no resource's id is."""
    try:
        return {name: unquote_to_bytes(path[place]).decode() for place, name in parameters}
    except UnicodeDecodeError:
        return None
