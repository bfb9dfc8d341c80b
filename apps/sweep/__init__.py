"""``flower-graph sweep``."""
