"""The control port: the control API, probes and the status page.

Start with `api` (the table of routes) and `control_server` (how a request is served). `*_endpoints` are the handlers,
grouped by subject. May import the services (auth, budgets, rates, usage, ledger, reports, alerts, telemetry) and
stores/contract. Only app imports it; `readiness_checks` (types of checks), `api_constants`, and `control_access` (the
admin key, which doctor checks) are the exceptions.
"""
