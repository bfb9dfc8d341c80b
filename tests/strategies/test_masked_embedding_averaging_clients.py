"""Clients that are odd, and clients that come later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ego_strategy_helpers import Outcome, ego, run, three_egos

from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.simulation import InProcessGrid

# Odd clients -------------------------------------------------------------------------------------


def unlabelled(network: EgoNetwork) -> EgoNetwork:
    none = torch.zeros(network.nodes.numel(), dtype=torch.bool)
    return replace(network, y=torch.full_like(network.y, -1), train_mask=none)


ODD = {
    "one node": ego(1, [2]),
    "no neighbours": ego(2, [1, 2, 3]),
    "no labels": unlabelled(ego(3, [2, 3, 5], [(2, 5)])),
    "nothing shared": ego(4, [20, 21], [(20, 21)]),
}


@pytest.mark.parametrize("what", ODD)
def test_an_odd_client_among_ordinary_ones(what: str) -> None:
    outcome = run([*three_egos()[:2], ODD[what]], supernodes=3, rounds=4)
    assert outcome.answered == [3] * 4
    assert outcome.figures[:, :3].isfinite().all()
    assert all(weights.isfinite().all() for weights in outcome.last.values())
    before = outcome.seen.weights[1][ODD[what].client]
    assert not torch.equal(before, outcome.last[ODD[what].client])


def test_odd_clients_only() -> None:
    outcome = run(list(ODD.values()), supernodes=4, rounds=4)
    assert outcome.answered == [4] * 4
    assert outcome.figures[:, 0].isfinite().all()


@pytest.mark.parametrize("alignment", ["psi", "plain"])
def test_nobody_has_shared_nodes(alignment: str) -> None:
    egos = [ego(1, [1, 2], [(1, 2)]), ego(2, [3, 4], [(3, 4)]), ego(3, [5])]
    outcome = run(egos, supernodes=3, rounds=3, alignment=alignment)
    assert outcome.answered == [3] * 3
    assert outcome.figures[:, 2].isnan().all()  # no contrast
    assert outcome.figures[:, 0].isfinite().all()


# Clients that come later -------------------------------------------------------------------------


class Joining(InProcessGrid):
    """The last node appears when the fourth round begins."""

    def get_node_ids(self) -> list[int]:
        nodes = super().get_node_ids()
        return nodes if self.everybody else nodes[:-1]

    everybody = False


def joined(egos: list[EgoNetwork], supernodes: int, **options: Any) -> Outcome:
    grids: list[Joining] = []

    def make(app: Any, num_supernodes: int) -> Joining:
        grids.append(Joining(app, num_supernodes=num_supernodes))
        return grids[0]

    def open_the_door(message: Any, context: Any, call_next: Any) -> Any:
        if message.metadata.message_type == "train" and message.metadata.group_id == "3":
            grids[0].everybody = True
        return call_next(message, context)

    return run(egos, supernodes=supernodes, make_grid=make, mods=[open_the_door], **options)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (5, {}),
        (8, {"model_sharing": "fedavg"}),
        (8, {"aggregation": "plain", "alignment": "plain"}),
        (5, {"alignment": "polynomial"}),
    ],
)
def test_a_client_joins_after_three_rounds(count: int, options: dict[str, Any]) -> None:
    # With five clients the newcomer changes the size of the ring as well. It brings node 30 with
    # it, which only one client held before: a new slot.
    others = [ego(k, [k, k + 1, k + 2], [(k, k + 1)]) for k in range(1, count)]
    egos = [*others, ego(60, [2, count + 1, 30], [(2, 30)])]
    egos[0] = ego(1, [1, 2, 3, 30], [(1, 30)])
    outcome = joined(egos, count, rounds=7, **options)
    # A round's report says who took part in its measurement, with the next round's vectors.
    assert outcome.answered == [count - 1] * 2 + [count] * 5
    assert not any(report.skipped or report.rejected for report in outcome.reports)
    assert outcome.figures[:, 0].isfinite().all()
    assert outcome.figures[3:, 2].isfinite().all()  # all of them fuse again
    assert 60 in outcome.last
    # Two more slots: node 30, and the last of the others' nodes.
    assert outcome.strategy.session.num_slots == count + 1
