"""The samples of several processes as one text for Prometheus, each with the number of its worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_HEADER_PREFIXES = ("# HELP ", "# TYPE ")


def merge_samples(texts: Mapping[int, str]) -> str:
    """Each metric is described once and has all its samples together, whoever told of it first."""
    headers: dict[str, dict[str, None]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in texts.items():
        name = ""
        for line in text.splitlines():
            if line.startswith(_HEADER_PREFIXES):
                name = line.split(" ", 3)[2]
                headers.setdefault(name, {}).setdefault(line)
            elif line:
                samples.setdefault(name, []).append(_add_worker_label(line, number))
    return "".join(f"{line}\n" for name in headers for line in (*headers[name], *samples.get(name, ())))


def _add_worker_label(line: str, number: int) -> str:
    """`name value` or `name{labels} value`: no name has a brace or a space."""
    name_end = next(at for at, letter in enumerate(line) if letter in "{ ")
    worker = f'worker="{number}"'
    return (
        f"{line[:name_end]}{{{worker}}}{line[name_end:]}"
        if line[name_end] == " "
        else f"{line[:name_end]}{{{worker},{line[name_end + 1 :]}"
    )
