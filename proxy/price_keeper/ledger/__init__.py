"""What was spent, counted exactly once: a write-ahead journal on disk, flushed to counters in the store.

A call's intent is in the journal before the call is sent, its receipt before its answer is complete. Sealed segments go
to the store in transactions with a marker each, so a repeat counts nothing twice. Start with `journal`, then
`segment_sender`, `recovery` and `recording`, which wires them; `aggregator` and `total_sweep` sum counters. May import:
domain, errors, clock, org_calendar, price_dimensions, config, stores, telemetry, tasks, alerts (file names of the
outbox only). Knows neither HTTP nor usage; of budgets only the rows and files of hard-budget leases.
"""
