"""Private matching of identities."""
