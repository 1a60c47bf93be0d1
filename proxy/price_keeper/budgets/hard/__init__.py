"""Hard budgets: the cost ceiling of a call is reserved before the call is sent.

`cost_ceiling` computes the ceiling and is pure; `budget_lease` holds the money that this process leased from the store.
May import: domain, errors, clock, operations, price_dimensions, stores, ledger.lease_rows, ledger.lease_file, usage
prices. Must not import the rest of budgets.
"""
