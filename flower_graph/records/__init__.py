"""What a round was: its figures, its bytes, and what became of each client."""
