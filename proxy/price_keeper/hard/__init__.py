"""Hard budgets: what a request may cost at most is set aside before it is forwarded."""
