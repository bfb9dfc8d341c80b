"""Where graphs come from: names, raw files, caches, generators."""
