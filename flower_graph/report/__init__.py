"""What a run reports: rounds, results, pictures."""
