"""existing-app: A Flower / PyTorch app."""
