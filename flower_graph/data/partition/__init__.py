"""Divides one graph among many clients."""
