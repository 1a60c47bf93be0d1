"""Bedrock Price Keeper: a sidecar that keeps every org and app on Amazon Bedrock inside its budget.

Every request takes these steps, in this order (`handler.RequestHandler.__call__`):

    authenticate -> parse -> join a retry -> reserve rate limits -> select a label -> meter -> forward

The receipt of the call is then written to the journal, and flushed to the store in the background (`ledger`).

State lives in three places: memory (bounded, rebuildable), the local journal (the only unreplicated truth), the store.

Imports point down only, from later lines of this list to earlier ones; `tests/tidy/test_imports.py` checks it:

    domain, errors, clock, exchange,
      operations, model_ids, price_dimensions,
      leaky_buckets, bounded_dict,
      client_tls                        shared types and tables, what may go wrong, limits and caches in memory, trust
    config, telemetry, tasks,
      single_flight                     what every service needs
    stores                              the contract of a store, and its two engines, SQLite and DynamoDB
    auth ... reports                    the services: auth, alerts, ledger, rates, upstream, usage, budgets, reports
    handler, server, control            the ports
    workers, app, doctor, cli           the process; composition, and the only modules that choose an engine

Modules whose docstring calls them pure use no asyncio, sockets or clock: they decide, and their callers act.
"""
