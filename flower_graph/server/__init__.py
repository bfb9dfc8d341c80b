"""The server: exchanges, membership, checkpoints, and averages of checked replies."""
