"""Secure sums of vectors and private matching of identities."""
