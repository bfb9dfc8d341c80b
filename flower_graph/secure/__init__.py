"""Sums of vectors that nobody sees singly, and matching of identities that nobody sees."""
