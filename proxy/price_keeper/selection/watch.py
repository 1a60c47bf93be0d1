"""When to look again after a standing, and what was seen."""

from __future__ import annotations

from asyncio import Event
from dataclasses import dataclass

from price_keeper.selection.overrides import Override
from price_keeper.selection.spent import NEVER
from price_keeper.selection.standing import BudgetState
from price_keeper.stores.contract import Item


@dataclass(slots=True)
class Watch:
    """Times are by the monotonic clock, but for `override_ends`."""

    standing: BudgetState
    is_settled: bool  # the settings are those of an org that somebody put
    due: float = -NEVER
    money_due: float = -NEVER  # when not only the settings are to be looked at
    money_old: float = -NEVER  # when what is known to be spent is too old to go by
    old: float = -NEVER  # from then on a call waits for a look: for money, or for own labels
    looked_at: float = -NEVER
    grace: float = 0.0  # from when a look for money is due until what is known is old
    state: Item | None = None  # of the active label and the override, as it was read
    knows_money: bool = False  # it was looked at, or recalled
    sticky: int = 0  # the active label, but for an override
    override: Override | None = None
    override_ends: float = NEVER
    warned_of: tuple[str, ...] = ()
    looking: Event | None = None
    is_slow: bool = False  # somebody has waited in vain for the look that is under way

    def forget(self) -> None:
        """The next call waits for a look at everything."""
        self.money_due = self.money_old = self.old = -NEVER
