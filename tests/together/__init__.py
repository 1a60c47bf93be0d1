"""An older version and this one together, on one store and on each other's journals: `python -m tests.together`."""
