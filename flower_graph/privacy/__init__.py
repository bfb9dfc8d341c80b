"""Differential privacy: budgets, and the noise that they need."""
