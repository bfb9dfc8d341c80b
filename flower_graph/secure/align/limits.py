"""The limits of an alignment for one client and one SuperNode.

A light module: a node config is read without the alignment's code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flower_graph.secure.node_config import whole_number

# Points of one client's block. It bounds the work that a client can give key-holders, and the
# identities that it can try out.
MOST_BLOCK = 1 << 14
# Points of all clients of one SuperNode: each key-holder multiplies all of them, in a minute.
MOST_POINTS = 1 << 18
LEAST_HOLDERS = 2  # clients that hold an identity which has a slot
OF_NODE, HOLDERS = "most-points", "least-holders"  # of the node config


@dataclass(frozen=True)
class Limits:
    """The limits of an alignment.

    Attributes
    ----------
    block_cap : int
        The most points of a client's block.
    most_points : int
        The most points of all clients of one SuperNode.
    least_holders : int
        The fewest clients that hold an identity with a slot.
    """

    block_cap: int = MOST_BLOCK
    most_points: int = MOST_POINTS
    least_holders: int = LEAST_HOLDERS

    def fault(self, block: int, before: int) -> str:
        """Say why a block is too large; empty if it is not.

        ``block`` is the number of its points, ``before`` that of other clients of the same
        SuperNode.
        """
        if block > self.block_cap:
            return f"its block has {block} points, at most {self.block_cap} are taken"
        if before + block > self.most_points:
            return (
                f"the clients of its SuperNode bring {before + block} points with it, at most "
                f"{self.most_points} are taken of one SuperNode"
            )
        return ""


def most_points(node_config: Mapping[str, object]) -> int:
    """Return the most points of one SuperNode that a key-holder accepts."""
    return whole_number(node_config, OF_NODE, MOST_POINTS, 1)


def least_holders(node_config: Mapping[str, object]) -> int:
    """Return how many clients must hold an identity in a SuperNode's sums."""
    return whole_number(node_config, HOLDERS, LEAST_HOLDERS, LEAST_HOLDERS)
