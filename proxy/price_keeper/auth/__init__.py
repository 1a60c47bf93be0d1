"""Authentication of callers: tokens, signing keys, revocation, refresh sessions, client secrets, container credentials.

Start with `authenticate.py`, which every call passes; it uses `tokens.py` and `revocation.py`. Logins go through
`client_secrets.py` and `refresh_sessions.py`. `registration.py` makes a client's secret, hands it out and rotates it.
`container_credentials.py` serves `GET /credentials`. `throttles.py` limits what unauthenticated senders may cause.

May import domain, errors, client_tls, clock, tasks, telemetry, config, stores; no other service. It knows the request
types, but not the server.
"""
