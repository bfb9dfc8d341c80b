"""The command ``flower-graph``."""
