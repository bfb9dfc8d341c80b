"""Settings of trust: the server's role, the least size of sums, their least difference."""

from __future__ import annotations

from collections.abc import Mapping

from flower_graph.secure.node_config import whole_number

# Whom clients trust whose vectors are summed hidden, and the fewest SuperNodes of such a sum where
# it is not the server: with fewer, a partner or two and the sum tell what one sent.
SEMI_HONEST, MALICIOUS_SERVER = TRUST = ("semi-honest", "malicious-server")
FEWEST_PARTIES = 5
DIFFER_BY = "differ-by"  # of the node config: SuperNodes that two sums of a run differ by
USUAL_DIFFERENCE = 2


def differ_by(node_config: Mapping[str, object]) -> int:
    """Return the node config's ``differ-by``, the least difference of two sums; usually 2."""
    return whole_number(node_config, DIFFER_BY, USUAL_DIFFERENCE, 1)
