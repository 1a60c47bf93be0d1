"""What a running process applies of a reloaded configuration: labels and prices. Pure.

`apply_reloadable` combines the running configuration with the reloadable keys of another. `list_restart_keys` names
the keys that differ and take effect only at a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final

from price_keeper.config.config_sections import Config

# These keys are reloaded together: the rules for them depend on no other keys (`Config.rules`).
RELOADABLE_KEYS: Final = ("labels", "unlabelled", "default_price", "guardrails")
MAX_NAMES_SHOWN: Final = 20  # in one log line


def apply_reloadable(running: Config, loaded: Config) -> Config:
    """The running configuration with the labels and prices of the loaded one."""
    return replace(running, **{name: getattr(loaded, name) for name in RELOADABLE_KEYS})


def list_restart_keys(running: Config, loaded: Config) -> list[str]:
    """The changed keys of config.yaml that take effect only at a restart."""
    return [path for path in iterate_differences(running, loaded) if path.split(".")[0] not in RELOADABLE_KEYS]


@dataclass(frozen=True, slots=True)
class CatalogChanges:
    """The differences in labels and prices between two configurations, formatted by `str()` for the log."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()  # labels in both, each with its changed keys
    others: tuple[str, ...] = ()  # changed keys outside of labels

    def __str__(self) -> str:
        parts = {"added": self.added, "removed": self.removed, "changed": self.changed, "other keys": self.others}
        descriptions = [f"{what}: {join_few(names)}" for what, names in parts.items() if names]
        return "; ".join(descriptions) or "nothing in them is another"


def compare_catalogs(before: Config, after: Config) -> CatalogChanges:
    kept = [name for name in after.labels if name in before.labels]
    changed_keys = {name: _list_top_keys(iterate_differences(before.labels[name], after.labels[name])) for name in kept}
    return CatalogChanges(
        tuple(name for name in after.labels if name not in before.labels),
        tuple(name for name in before.labels if name not in after.labels),
        tuple(f"{name} ({join_few(keys)})" for name, keys in changed_keys.items() if keys),
        tuple(
            path
            for name in RELOADABLE_KEYS[1:]
            for path in iterate_differences(getattr(before, name), getattr(after, name), name)
        ),
    )


def _list_top_keys(paths: Iterable[str]) -> list[str]:
    """The first part of each path, without repeats."""
    return list(dict.fromkeys(path.split(".")[0] for path in paths))


def iterate_differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """The paths at which two values differ, as deep as both values have them."""
    if one == other:
        return
    if is_dataclass(one) and type(one) is type(other) and not hasattr(one, "from_text"):
        names: Iterable[str] = [each.name for each in fields(one)]
        pairs = ((name, getattr(one, name), getattr(other, name)) for name in names)
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        pairs = ((name, one.get(name), other.get(name)) for name in dict.fromkeys((*one, *other)))
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        pairs = ((str(number), *pair) for number, pair in enumerate(zip(one, other, strict=True)))
    else:
        yield path
        return
    for name, before, after in pairs:
        yield from iterate_differences(before, after, f"{path}.{name}" if path else name)


def join_few(names: Iterable[str]) -> str:
    all_names = list(names)
    suffix = f" and {len(all_names) - MAX_NAMES_SHOWN} more" if len(all_names) > MAX_NAMES_SHOWN else ""
    return ", ".join(all_names[:MAX_NAMES_SHOWN]) + suffix
