"""Which configured label a caller's model name stands for. Pure.

A label is called by its own name, by its model's id or by an alias; a model's id and an alias count in every form that
Bedrock has for them (`model_ids`). The name only selects the label: which model is called, at which price, is the
label's. Two labels may have different profiles of one model; a form of it that neither of them writes is then of none.
"""

from __future__ import annotations

from collections.abc import Mapping

from price_keeper.config.config_sections import PSEUDO_LABELS, LabelConfig
from price_keeper.model_ids import find_base_model


class LabelNames:
    def __init__(self, labels: Mapping[str, LabelConfig]) -> None:
        self._labels = labels
        self._by_written_name = {name: label for label, config in labels.items() for name in config.model_names}
        labels_by_base: dict[str, set[str]] = {}
        for name, label in self._by_written_name.items():
            labels_by_base.setdefault(find_base_model(name), set()).add(label)
        self._by_base_model = {base: owners.pop() for base, owners in labels_by_base.items() if len(owners) == 1}

    def is_taken(self, name: str) -> bool:
        """Whether this is a name of the configuration, so that no app's own label has it, whichever came first."""
        return name in PSEUDO_LABELS or self.find(name) is not None

    def find_written(self, name: str) -> str | None:
        """The label whose own name, model or alias this is, as it is written; None if there is none."""
        return name if name in self._labels else self._by_written_name.get(name)

    def find(self, name: str) -> str | None:
        """The label that the name stands for; None if there is none."""
        return self.find_written(name) or self._by_base_model.get(find_base_model(name))
