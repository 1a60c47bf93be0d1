"""Several worker processes that serve one data port. Start with `supervisor.py`, which forks and restarts them.

`worker_slot.py` is a process's index among the workers; with `worker_group.py` the first worker reports readiness and
metrics of all. May import config, telemetry, ledger and control's types; only app, cli and config_reload import it.
"""
