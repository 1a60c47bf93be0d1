"""When to look again after a standing, and what was seen."""

from __future__ import annotations

from asyncio import Event
from dataclasses import dataclass

from price_keeper.selection.overrides import Override
from price_keeper.selection.spent import NEVER
from price_keeper.selection.standing import BudgetState
from price_keeper.stores.contract import Item


@dataclass(slots=True)
class RefreshState:
    """Times are by the monotonic clock, but for `override_ends`."""

    budget: BudgetState
    is_registered: bool  # the settings are those of an org that somebody put
    due_at: float = -NEVER
    spend_due_at: float = -NEVER  # when not only the settings are to be looked at
    spend_stale_at: float = -NEVER  # when what is known to be spent is too old to go by
    stale_at: float = -NEVER  # from then on a call waits for a look: for money, or for own labels
    spend_read_at: float = -NEVER
    grace_seconds: float = 0.0  # from when a look for money is due until what is known is old
    sticky_item: Item | None = None  # of the active label and the override, as it was read
    has_spend: bool = False  # it was looked at, or recalled
    sticky_index: int = 0  # the active label, but for an override
    override: Override | None = None
    override_ends_at: float = NEVER
    warned_problems: tuple[str, ...] = ()
    refresh_done: Event | None = None
    is_refresh_slow: bool = False  # somebody has waited in vain for the look that is under way

    def expire(self) -> None:
        """The next call waits for a look at everything."""
        self.spend_due_at = self.spend_stale_at = self.stale_at = -NEVER
