"""The record of a round: its figures, its bytes, and what became of each client."""
