"""Alerts: when spend crosses a threshold of a quota, the fleet raises one alert and delivers it to a webhook.

`alert.py` defines an alert, `alert_raiser.py` raises it once, `alert_outbox.py` keeps it on disk, `alert_delivery.py`
retries, `webhook.py` sends. `alert_setup.py` builds all of them from the configuration. Start with `alert_raiser.py`.

May import domain, errors, client_tls, clock, org_calendar, tasks, telemetry, config, stores; no other service.
"""
