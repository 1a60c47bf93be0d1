"""Who calls: tokens and their signing keys, revocation, refresh sessions, client secrets, container credentials.

Start with `authenticate.py`, which every call passes. `tokens.py` and `revocation.py` are what it asks. Logins go
through `client_secrets.py` and `refresh_sessions.py`; a secret is made, handed out and rotated in `registration.py`;
`GET /credentials` is `container_credentials.py`. `throttles.py` bounds what strangers may cause.

May import domain, errors, clock, tasks, telemetry, config, stores; no other service. It knows the request types, no
server.
"""
