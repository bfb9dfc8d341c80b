"""nFedGNN: one node per client."""
