"""Matching of identities that nobody sees."""
