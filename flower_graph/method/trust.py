"""Settings of methods whose clients may distrust the server."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from flower_graph.config.common import RunConfig, StrategySection
from flower_graph.config.rules import at_least, choice
from flower_graph.config.schema import setting
from flower_graph.secure import node_config


@dataclass
class TrustSection(StrategySection):
    """The section ``strategy`` of methods whose clients send masked sums."""

    trust: str = setting(node_config.SEMI_HONEST, choice(*node_config.TRUST))
    """whether the server is taken to follow the protocol; `malicious-server`: it may not, from five
    SuperNodes on, each with a registered key (`flower-graph docs secure-sum`)"""
    registry: str | None = setting(None)
    """file of the registered keys at the server, `malicious-server` only; null: throw-away keys,
    for SuperNodes on the server's own machine"""

    @property
    def distrusts(self) -> bool:
        """Whether clients expect that the server may deviate from the protocol."""
        return self.trust == node_config.MALICIOUS_SERVER

    @property
    def fewest_nodes(self) -> int:
        return max(self.min_nodes, node_config.FEWEST_PARTIES) if self.distrusts else self.min_nodes


@dataclass
class OpenedSums(TrustSection):
    """The section for methods whose server opens the sums, and so could compare two of them."""

    least_holders: int = setting(node_config.LEAST_HOLDERS, at_least(node_config.LEAST_HOLDERS))
    """clients that must hold a node whose embeddings are summed; of two each learns the other's"""
    differ_by: int = setting(node_config.USUAL_DIFFERENCE, at_least(1))
    """SuperNodes that two sums differ by at least, `malicious-server` only; no SuperNode takes less
    than its node config's `differ-by`"""


def check_trust(config: RunConfig, readable: Mapping[str, str], choosing: str = "") -> None:
    """Refuse settings with which a deviating server could read clients' data.

    ``readable``: keys of the section ``strategy`` that are set so, and why. ``choosing``: the
    alignment that chooses slots by their holders.
    """
    how, trust = config.strategy, "strategy.trust"
    assert isinstance(how, TrustSection)
    is_read = how.registry is None or how.distrusts
    config.clash(not is_read, "strategy.registry", trust, "it is not read; set it to null")
    for key, why in readable.items():
        config.clash(how.distrusts, f"strategy.{key}", trust, why)
    if isinstance(how, OpenedSums):
        usual = node_config.USUAL_DIFFERENCE
        is_kept, why = how.differ_by == usual or how.distrusts, f"it is not kept; set it to {usual}"
        config.clash(not is_kept, "strategy.differ_by", trust, why)
        alignment = "strategy.alignment"
        is_chosen = attrgetter(alignment)(config) == choosing
        more = how.least_holders > node_config.LEAST_HOLDERS and not is_chosen
        why = f"set {alignment}={choosing}, which chooses nodes by their holders"
        config.clash(more, "strategy.least_holders", alignment, why)
