"""Speed and memory; ``make bench`` runs it all and writes ``docs/performance.md``."""
