"""Storage: one contract with two engines, SQLite for one machine and DynamoDB for a fleet.

Start with `contract`: the operations and what they guarantee. `schema` has the tables and keys. Services import
`contract`, `schema`, `conflict_retry`, `audit_log`, `item_values` and `item_codec`; only `app`, `cli` and `doctor` name
an engine.
May import: domain, errors, clock, config, aws_session, provider_chain.
"""
