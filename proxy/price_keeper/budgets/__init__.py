"""Budgets: which label serves a call, what it is charged to, and whether money is left.

Start with `label_selector`, then `budget_state` (decisions) and `budget_registry` (all states). Under a hard budget
`hard_label_selector` selects, with the ceilings and leases of `hard`. `label_policy` and `effective_settings` are pure
functions. May import: domain, errors, clock, org_calendar, exchange, operations, model_ids, parse_call, tasks, config,
telemetry, stores, alerts, ledger, upstream, usage, and of rates `rate_limit_settings`. Must not import handler, server,
control, reports or cli.
"""
