"""Schemas of settings and their rules: which keys and values a YAML file may have."""
