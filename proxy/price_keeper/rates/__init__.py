"""Rate limits: token buckets in the store, shared by a fleet through leases.

    rate_limiter         what the handler calls: reserve before a call, settle after it. START HERE.
    rate_lease_manager   admits calls against leases and tops the leases up
    rate_lease           how much to hold and to ask for (pure)
    bucket_client        takes from the buckets in the store and gives back
    token_bucket, bucket_writes, rate_limit_settings   arithmetic, conditional writes, settings (pure)
    store_time           the store's clock, by the responses that the store's engine reports

Imports domain, errors, clock, tasks, single_flight, exchange, telemetry, of stores `contract`, `schema` and
`item_values`, and of ledger the receipt. Imports nothing of budgets, which imports `rate_limit_settings`.
"""
