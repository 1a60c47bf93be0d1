"""Bedrock Price Keeper: a sidecar that keeps every org and app on Amazon Bedrock inside its budget.

A request walks through six rooms, in this order, without turning back:

    identify -> admit -> select -> forward -> meter -> record

State lives in three places: memory (bounded, rebuildable), the local journal (the only unreplicated truth), the store.

Imports point down only; `tests/tidy/` holds the code to it:

    model, errors                       words of the product, and what may go wrong
    pure files                          no asyncio, no sockets, no clock: decide, and let the caller act
    stores/contract                     what a store promises
    stores/sqlite, stores/dynamodb      the two engines
    app, cli                            composition; the only files that name concrete classes
"""
