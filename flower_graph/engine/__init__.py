"""Many small models as one tensor program; PyTorch alone, neither Flower nor PyTorch Geometric."""
