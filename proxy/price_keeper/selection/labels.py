"""The labels of the configuration and an app's own, and what a caller may call them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from price_keeper.config.config_sections import LabelConfig
from price_keeper.domain import ResolvedLabel
from price_keeper.errors import Busy, InvalidRequest
from price_keeper.metering.profiles import NO_PROFILES, UNREAD_PROFILES, AppProfiles, ResolvedProfile

UNREAD_RETRY_SECONDS = 3.0


class LabelResolver:
    def __init__(self, labels: Mapping[str, LabelConfig], *, allows_unlabelled: bool) -> None:
        self._labels = labels
        self._by_model = {label.model: name for name, label in labels.items()}
        self._allows_unlabelled = allows_unlabelled

    def resolve_configured(self, requested: str) -> ResolvedLabel | None:
        """A label by its name, or by the id of the model it stands for."""
        name = requested if requested in self._labels else self._by_model.get(requested)
        return None if name is None else ResolvedLabel(requested, name, self._labels[name].model)

    def resolve(self, requested: str, app_labels: AppProfiles = NO_PROFILES) -> ResolvedLabel:
        """Also one of the caller's own; what the configuration knows goes first. Raises InvalidRequest and Busy."""
        resolved = self.resolve_configured(requested) or app_labels.resolve(requested)
        if resolved is not None:
            return resolved
        if self._allows_unlabelled:
            return ResolvedLabel(requested, "", requested)
        if app_labels is UNREAD_PROFILES:
            message = f"{requested[:200]!r} may be a label of the app's own, and those cannot be read"
            raise Busy(message, retry_after=UNREAD_RETRY_SECONDS)
        allowed = f"{', '.join((*self._labels, *app_labels.by_name))}, and the models they stand for"
        raise InvalidRequest(f"there is no label for {requested[:200]!r}; there are {allowed}")

    def substitute(self, resolved: ResolvedLabel, label: str, app_labels: AppProfiles = NO_PROFILES) -> ResolvedLabel:
        if label in self._labels:
            return ResolvedLabel(resolved.requested, label, self._labels[label].model)
        profile = app_labels.by_name[label]
        return ResolvedProfile(resolved.requested, label, profile.label.model, profile)
