"""What people and machines see on the control port."""
