"""How one graph becomes many clients."""
