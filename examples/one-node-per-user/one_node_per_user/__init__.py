"""one-node-per-user: A Flower / PyTorch app."""
