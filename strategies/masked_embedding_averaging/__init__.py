"""FedSCem, one ego-network for each client, and its baselines."""
