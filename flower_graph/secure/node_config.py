"""A SuperNode's settings of secure sums and alignments: its node config's, or defaults.

A light module: a node config is read without the code of sums and alignments.
"""

from __future__ import annotations

from collections.abc import Mapping

from flower_graph.errors import ConfigError, brief

# Whom clients trust whose vectors are summed hidden, and the fewest SuperNodes of such a sum where
# it is not the server: with fewer, a partner or two and the sum tell what one sent.
SEMI_HONEST, MALICIOUS_SERVER = TRUST = ("semi-honest", "malicious-server")
FEWEST_PARTIES = 5
USUAL_DIFFERENCE = 2  # SuperNodes that two sums of a run differ by
# Points of one client's block. It bounds the work that a client can give key-holders, and the
# identities that it can try out.
MOST_BLOCK = 1 << 14
# Points of all clients of one SuperNode: each key-holder multiplies all of them, in a minute.
MOST_POINTS = 1 << 18
LEAST_HOLDERS = 2  # clients that hold an identity which has a slot
# Keys of the node config
DIFFER_BY, LEAST_CLIENTS = "differ-by", "least-clients"
OF_NODE, HOLDERS = "most-points", "least-holders"


def whole_number(
    node_config: Mapping[str, object], key: str, default: int, low: int, high: int | None = None
) -> int:
    """Read a whole number; ``ConfigError`` names the key, the value and what is allowed."""
    value = node_config.get(key, default)
    if type(value) is not int or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"node-config {key}: {brief(value)}; must be a whole number {allowed}")
    return value


def differ_by(node_config: Mapping[str, object]) -> int:
    """Return the least difference of two sums; usually 2."""
    return whole_number(node_config, DIFFER_BY, USUAL_DIFFERENCE, 1)


def least_clients(node_config: Mapping[str, object]) -> int:
    """Return the fewest clients in a sum; usually 1."""
    return whole_number(node_config, LEAST_CLIENTS, 1, 1)


def most_points(node_config: Mapping[str, object]) -> int:
    """Return the most points of one SuperNode that a key-holder accepts."""
    return whole_number(node_config, OF_NODE, MOST_POINTS, 1)


def least_holders(node_config: Mapping[str, object]) -> int:
    """Return how many clients must hold an identity in a SuperNode's sums."""
    return whole_number(node_config, HOLDERS, LEAST_HOLDERS, LEAST_HOLDERS)
