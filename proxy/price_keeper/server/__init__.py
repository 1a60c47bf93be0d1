"""The HTTP server of the data port: HTTP/1.1 and HTTP/2, plain or over TLS, with limits on everything a client can use.

It parses requests and writes responses, and hands each complete request to a handler (`exchange`). Tokens, budgets and
Bedrock are the handler's concern. Start with `listener`, then `acceptors`, `http1` and `http1_parser`; for HTTP/2,
`http2_frames` (frames, and the states of a stream), `http2_headers`, `http2` and `http2_stream`.

May import: errors, clock, exchange, tasks, local_responses, and of auth.throttles the network of an address. Only
`data_port_metrics` also imports telemetry and upstream.
"""
