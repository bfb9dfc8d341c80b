"""The tables of each paper, and tables that no paper has: one file each."""
