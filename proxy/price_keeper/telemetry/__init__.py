"""Metrics, request statistics, traces and logs.

Any module may import from here. `metrics` lists all metrics; start there. `request_stats` counts and times requests,
`logs` formats the log, `incident` logs a trouble that lasts, `tracing` exports spans. Importing the package itself
loads nothing.
"""
