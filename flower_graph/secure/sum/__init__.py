"""Sums of vectors that nobody sees singly."""
