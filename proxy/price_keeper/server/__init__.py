"""The HTTP server of the data port: HTTP/1.1 and HTTP/2, plain or over TLS, within bounds.

Knows nothing of tokens, budgets or Bedrock: it imports only errors, clock, tasks and telemetry, and hands each complete
request to a handler (`exchange`). Start with `listener`, then `acceptors`, `http1` and `http1_parser`.
"""
