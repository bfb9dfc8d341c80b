"""Secure sums of vectors."""
