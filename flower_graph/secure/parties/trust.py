"""Whom clients take the server for, and how few of them a sum may have."""

# Whom clients trust whose vectors are summed hidden, and the fewest SuperNodes of such a sum where
# it is not the server: with fewer, a partner or two and the sum tell what one sent.
SEMI_HONEST, MALICIOUS_SERVER = TRUST = ("semi-honest", "malicious-server")
FEWEST_PARTIES = 5
