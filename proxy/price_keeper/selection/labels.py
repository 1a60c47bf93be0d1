"""The labels of the configuration and an app's own, and what a caller may call them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from price_keeper.config.keys import LabelConfig
from price_keeper.errors import Busy, InvalidRequest
from price_keeper.metering.profiles import NOTHING, UNREAD, Own, OwnChoice
from price_keeper.model import ResolvedLabel

ASK_AGAIN_SECONDS = 3.0


class Labels:
    def __init__(self, labels: Mapping[str, LabelConfig], *, lets_others_through: bool) -> None:
        self._labels = labels
        self._by_model = {label.model: name for name, label in labels.items()}
        self._lets_others_through = lets_others_through

    def configured(self, requested: str) -> ResolvedLabel | None:
        """A label by its name, or by the id of the model it stands for."""
        name = requested if requested in self._labels else self._by_model.get(requested)
        return None if name is None else ResolvedLabel(requested, name, self._labels[name].model)

    def choose(self, requested: str, own: Own = NOTHING) -> ResolvedLabel:
        """Also one of the caller's own; what the configuration knows goes first. Raises InvalidRequest and Busy."""
        choice = self.configured(requested) or own.chosen(requested)
        if choice is not None:
            return choice
        if self._lets_others_through:
            return ResolvedLabel(requested, "", requested)
        if own is UNREAD:
            told = f"{requested[:200]!r} may be a label of the app's own, and those cannot be read"
            raise Busy(told, retry_after=ASK_AGAIN_SECONDS)
        known = f"{', '.join((*self._labels, *own.by_name))}, and the models they stand for"
        raise InvalidRequest(f"there is no label for {requested[:200]!r}; there are {known}")

    def instead_of(self, choice: ResolvedLabel, label: str, own: Own = NOTHING) -> ResolvedLabel:
        if label in self._labels:
            return ResolvedLabel(choice.requested, label, self._labels[label].model)
        profile = own.by_name[label]
        return OwnChoice(choice.requested, label, profile.label.model, profile)
