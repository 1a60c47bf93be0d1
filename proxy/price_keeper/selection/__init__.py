"""Which model answers: from what the caller asked for to a label."""
