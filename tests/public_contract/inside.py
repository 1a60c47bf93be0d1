"""What is not told from outside as a whole: read from the few tables of the product that have all of it."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import price_keeper as product
from price_keeper.config import Config
from price_keeper.control.api_errors import ERROR_CODES, SESSION_LIMIT_RACE
from price_keeper.control.oauth import OAUTH_ERRORS
from price_keeper.errors import Refusal
from price_keeper.telemetry.metrics import ALL_METRICS

_NAMES = re.compile(r"(?i)[a-z_.-]*price[_-]keeper[a-z0-9_-]*")
_MODULES = [product.__name__, *(each.name for each in pkgutil.walk_packages(product.__path__, f"{product.__name__}."))]

_LOGGERS = """
import importlib, logging, sys
for name in sys.argv[1:]:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(*logging.root.manager.loggerDict)
"""


def configuration() -> dict[str, Any]:
    """Each key and its default."""
    return dict(sorted(_keys(Config, "")))


def _keys(section: type, path: str) -> Iterator[tuple[str, Any]]:
    kinds = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name, kind = f"{path}{field.name}", kinds[field.name]
        below = list(_sections(kind, name))
        if not below or field.default is None:
            yield name, _default(field)
        for inner, place in below:
            yield from _keys(inner, f"{place}.")


def _sections(kind: Any, path: str) -> Iterator[tuple[type, str]]:
    """Those that stand below a key: in its place, in each place of a list, or under each name."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not hasattr(kind, "from_text"):
            yield kind, path
        return
    arguments = [each for each in typing.get_args(kind) if each is not Ellipsis]
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        below = path
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        below, arguments = f"{path}.*", arguments[1:]
    else:
        below = f"{path}[]"
    for each in arguments:
        yield from _sections(each, below)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return _plain(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else _plain(field.default_factory())


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def errors() -> dict[str, Any]:
    refusals = {each.counted_as: [each.status, each.error_type] for each in _all(Refusal)}
    return {
        "data port: kind in metrics, status, x-amzn-errortype": dict(sorted(refusals.items())),
        "control port: status, error": dict(sorted(ERROR_CODES.items())),
        "control port: 503, other errors": [SESSION_LIMIT_RACE],
        "control port: OAuth 2.0, error": list(OAUTH_ERRORS),
    }


def _all(kind: type) -> Iterator[Any]:
    for each in kind.__subclasses__():
        if each.__module__.split(".")[0] == product.__name__:
            yield each
            yield from _all(each)


def metrics() -> dict[str, str]:
    """Including those without a measurement."""
    return {metric.name: metric.kind for metric in ALL_METRICS}


def loggers() -> list[str]:
    """In a process of its own: tests that ran before in this one may have made loggers of other names."""
    done = subprocess.run([sys.executable, "-c", _LOGGERS, *_MODULES], capture_output=True, text=True, check=True)
    return sorted(name for name in done.stdout.split() if name.split(".")[0] == product.__name__)


def names() -> list[str]:
    """Every name with the product's in it that stands in the code as a string: headers, variables, metrics and more."""
    found: set[str] = set()
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        found.update(_texts(spec.loader.get_code(name)))  # type: ignore[attr-defined]
    return sorted(each for each in found if _NAMES.fullmatch(each) and not each.startswith(f"{product.__name__}."))


def _texts(code: types.CodeType) -> Iterator[str]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _texts(each)
        yield from _strings(each)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield value.decode("latin-1")
    elif isinstance(value, tuple | frozenset):
        for each in value:
            yield from _strings(each)
