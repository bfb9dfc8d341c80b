"""Sources of graphs: names, raw files, caches, generators."""
