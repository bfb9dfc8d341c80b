"""Settings of methods whose clients may distrust the server."""

from collections.abc import Mapping
from dataclasses import dataclass

from flower_graph.config.common import StrategySection
from flower_graph.config.rules import at_least, choice, refuse_with
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

    def refuse_trust(self, readable: Mapping[str, str]) -> None:
        """Refuse settings with which a deviating server could read clients' data."""
        if self.registry is not None and not self.distrusts:
            why = "it is not read; set strategy.registry=null"
            refuse_with("strategy.registry", self.registry, f"strategy.trust={self.trust}", why)
        for key, why in readable.items() if self.distrusts else ():
            trust = f"strategy.trust={node_config.MALICIOUS_SERVER}"
            refuse_with(f"strategy.{key}", getattr(self, key), trust, why)


@dataclass
class OpenedSums(TrustSection):
    """The section for methods whose server opens the sums, and so could compare two of them."""

    least_holders: int = setting(node_config.LEAST_HOLDERS, at_least(node_config.LEAST_HOLDERS))
    """clients that must hold a node whose embeddings are summed; of two each learns the other's"""
    differ_by: int = setting(node_config.USUAL_DIFFERENCE, at_least(1))
    """SuperNodes that two sums differ by at least, `malicious-server` only; no SuperNode takes less
    than its node config's `differ-by`"""

    def refuse_trust(self, readable: Mapping[str, str]) -> None:
        super().refuse_trust(readable)
        if self.differ_by != node_config.USUAL_DIFFERENCE and not self.distrusts:
            why = f"it is not kept; set strategy.differ_by={node_config.USUAL_DIFFERENCE}"
            refuse_with("strategy.differ_by", self.differ_by, f"strategy.trust={self.trust}", why)

    def refuse_holders(self, alignment: str, choosing: str) -> None:
        """Refuse ``least_holders`` with an alignment that does not choose slots by holders."""
        if self.least_holders > node_config.LEAST_HOLDERS and alignment != choosing:
            why = f"set strategy.alignment={choosing}, which chooses nodes by their holders"
            other = f"strategy.alignment={alignment}"
            refuse_with("strategy.least_holders", self.least_holders, other, why)
