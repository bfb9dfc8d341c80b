"""The audit of LPGNN: which features a user has, from what it has sent once."""

from collections.abc import Iterator
from typing import Any

from flower_graph.audit import attacks, suite
from flower_graph.data.sources.datasets import cached_data
from flower_graph.strategies.lpgnn import FeatureRequest, LPGNNConfig

SENT, USERS = "sent", 200  # users that are attacked


class FeatureAudit(attacks.Audit[LPGNNConfig]):
    """The attack on a run of LPGNN."""

    rounds, one_supernode = 2, True  # all is sent in the first
    notes = (
        "The attacker takes the features that a user has sent as +1 for those that it has, and "
        "guesses as many as the user has, which it is told. It does not smooth over neighbours.",
    )

    def view(self, message: attacks.Exchange) -> Iterator[tuple[str, int, Any]]:
        if message.kind == "train":
            request = FeatureRequest.from_config(attacks.config_of(message.request))
            rows = attacks.array_of(message.reply, "arrays", "features")
            for user, row in zip(request.users.tolist(), rows, strict=True):
                yield SENT, user, row

    def findings(
        self, config: LPGNNConfig, seen: attacks.Seen, method: object
    ) -> list[attacks.Finding]:
        x, rng = cached_data(config).x.to_dense().numpy(), attacks.audit_rng(config)
        drawn = attacks.users_drawn(x, USERS, rng)
        rows = {user: seen[SENT][user][0].astype(float) for user in drawn}
        return suite.features_found({"from what was sent": rows}, x != 0, rng)
