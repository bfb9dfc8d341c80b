"""The record of a round: its figures, its bytes, and each client's outcome."""
