"""Metrics, request statistics, traces and logs.

Imports only errors, domain, config and (for types) the components that are measured. Any module may import from here.
Start with `metrics`, the list of all metrics; importing the package itself loads nothing.
"""
