"""The samples of several processes as one text for Prometheus, each with the number of its worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_HEADS = ("# HELP ", "# TYPE ")


def merged(texts: Mapping[int, str]) -> str:
    """Each metric is described once and has all its samples together, whoever told of it first."""
    heads: dict[str, dict[str, None]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in texts.items():
        name = ""
        for line in text.splitlines():
            if line.startswith(_HEADS):
                name = line.split(" ", 3)[2]
                heads.setdefault(name, {}).setdefault(line)
            elif line:
                samples.setdefault(name, []).append(_labelled(line, number))
    return "".join(f"{line}\n" for name in heads for line in (*heads[name], *samples.get(name, ())))


def _labelled(line: str, number: int) -> str:
    """`name value` or `name{labels} value`: no name has a brace or a space."""
    at = next(at for at, letter in enumerate(line) if letter in "{ ")
    worker = f'worker="{number}"'
    return f"{line[:at]}{{{worker}}}{line[at:]}" if line[at] == " " else f"{line[:at]}{{{worker},{line[at + 1 :]}"
