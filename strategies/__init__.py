"""One file per paper, both halves of its algorithm."""
