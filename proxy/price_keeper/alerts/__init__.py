"""A share of a quota is spent: somebody is told, once.

thresholds   which shares are reached, and what the next one is
alert        what is told
raising      one alert for the fleet, by a marker in the store
outbox       alerts on this process's disk until they are delivered
deliveries   from the outbox to the receiver, again and again
webhook      one signed request to the operator's receiver
addresses    which addresses may be connected to
composed     all of it, from the configuration
"""

from price_keeper.alerts.alert import crossed_thresholds, next_threshold_pico
from price_keeper.alerts.alert_raiser import AlertRaiser

__all__ = ["AlertRaiser", "crossed_thresholds", "next_threshold_pico"]
