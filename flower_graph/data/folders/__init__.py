"""Data folders: each party's part of a run's data."""
