"""What each party has on its own disk."""
