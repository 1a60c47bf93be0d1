"""What was spent, written down exactly once."""
