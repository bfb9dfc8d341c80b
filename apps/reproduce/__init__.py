"""``flower-graph reproduce``: the papers' tables and figures."""
