"""Outputs of a run, written and read: predictions, models, figures by client."""
