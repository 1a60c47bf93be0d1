"""Several processes that serve one data port. Start with `supervisor.py`, which forks and restarts them.

`worker_slot.py` is a process's number among them; through `worker_group.py` the first worker answers readiness and
metrics for all. May import config, telemetry, ledger and control's types; only app and cli import it.
"""
