"""secure-average: A Flower / PyTorch app."""
