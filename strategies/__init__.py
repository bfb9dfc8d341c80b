"""One file or folder for each paper, with both halves of its algorithm."""
