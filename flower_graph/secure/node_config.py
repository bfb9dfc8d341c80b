"""A SuperNode's settings of secure sums and alignments: its node config's, or defaults.

A light module: a node config is read without the code of sums and alignments.
"""

from collections.abc import Mapping
from functools import partial

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


# The least difference of two sums, the fewest clients in a sum, the most points that a key-holder
# accepts of a SuperNode, and how many clients must hold an identity in its sums
differ_by = partial(whole_number, key=DIFFER_BY, default=USUAL_DIFFERENCE, low=1)
least_clients = partial(whole_number, key=LEAST_CLIENTS, default=1, low=1)
most_points = partial(whole_number, key=OF_NODE, default=MOST_POINTS, low=1)
least_holders = partial(whole_number, key=HOLDERS, default=LEAST_HOLDERS, low=LEAST_HOLDERS)
