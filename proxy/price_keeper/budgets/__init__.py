"""Budgets: which label serves a call, what it is charged to, and whether money is left.

Start with `label_selector`, then `budget_state` (decisions) and `budget_registry` (all states). `label_policy` and
`effective_settings` are pure functions. May import: domain, errors, clock, org_calendar, operations, config, stores,
ledger, usage, upstream, alerts, telemetry, and budgets.hard. Must not import server, control, reports or cli.
"""
