"""Reports of a run: rounds, results, pictures."""
