"""Storage: one contract with two engines, SQLite for one machine and DynamoDB for a fleet.

Start with `contract`: the operations and what they guarantee. `schema` has the tables and keys. Services import
`contract`, `schema` and `conflict_retry`; only `app`, `cli` and `doctor` name an engine.
May import: domain, errors, clock, config.
"""
