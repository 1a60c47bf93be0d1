"""What an answer used, and what that costs."""
