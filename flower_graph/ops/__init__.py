"""The papers' mathematics as pure functions on tensors; nothing here imports Flower."""
