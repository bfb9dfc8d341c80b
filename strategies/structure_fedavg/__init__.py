"""FedGLS: clients with and without edges, and its baselines."""
