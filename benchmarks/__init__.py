"""Speed and memory; ``make bench`` runs it all and writes the pages on performance."""
