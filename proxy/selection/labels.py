"""The labels of the configuration, and what a caller may call them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.config.keys import Label
from proxy.errors import InvalidRequest
from proxy.model import Choice


class Labels:
    def __init__(self, labels: Mapping[str, Label], *, lets_others_through: bool) -> None:
        self._labels = labels
        self._by_model = {label.model: name for name, label in labels.items()}
        self._lets_others_through = lets_others_through

    def choose(self, requested: str) -> Choice:
        """A label by its name, or by the id of the model it stands for. Raises InvalidRequest."""
        name = requested if requested in self._labels else self._by_model.get(requested)
        if name is not None:
            return Choice(requested, name, self._labels[name].model)
        if self._lets_others_through:
            return Choice(requested, "", requested)
        known = f"{', '.join(self._labels)}, and the models they stand for"
        raise InvalidRequest(f"there is no label for {requested[:200]!r}; there are {known}")

    def instead_of(self, choice: Choice, label: str) -> Choice:
        return Choice(choice.requested, label, self._labels[label].model)
