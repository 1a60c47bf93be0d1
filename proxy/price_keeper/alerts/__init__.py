"""A threshold of a quota is crossed: raise one alert in the whole fleet and deliver it to the operator's webhook.

`alert.py` says what an alert is, `alert_raiser.py` raises it once, `alert_outbox.py` keeps it on disk,
`alert_delivery.py` retries, `webhook.py` sends. `alert_setup.py` builds all of it from the configuration.

May import domain, errors, clock, org_calendar, tasks, telemetry, config, stores; no other service.
"""
