"""The way to Bedrock and back: sign, send, relay and observe. Knows HTTP, but not budgets, rates or the ledger.

    forwarder            sends a call to the first endpoint that accepts it. START HERE.
    relay                one response on its way to the caller
    connection_pool      connections, timeouts, host names
    retry_joiner         SDK retries share one upstream call
    upstream_health      whether Bedrock can be reached
    aws_credentials, sigv4     credentials and signatures
    request_metadata, chat_stream_usage, json_splice   what is changed in a request
    token_counter        asks Bedrock to count tokens
    profile_models       asks Bedrock which model an application inference profile is of
    eventstream          frames (pure)

Imports errors, client_tls, clock, tasks, single_flight, operations, model_ids, provider_chain, exchange,
telemetry.incident and telemetry.request_stats only. sigv4, eventstream and json_splice do no I/O.
"""
