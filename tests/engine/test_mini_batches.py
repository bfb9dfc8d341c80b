"""Which nodes each step of an epoch is on."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flower_graph.engine.cohort import MiniBatch, epochs_of

# Three clients of five nodes, one and three; of the last nobody takes part.
GRAPH: Any = SimpleNamespace(ptr=[0, 5, 6, 9], clients=[4, 7, 2])
AMONG = torch.tensor([1, 1, 0, 1, 1, 1, 0, 0, 0], dtype=torch.bool)
ORDER: Any = {"size": 3, "seed": 1, "server_round": 2, "purpose": "local", "epochs": 1}


def drawn(**changes: object) -> list[list[MiniBatch]]:
    return list(epochs_of(GRAPH, AMONG, **ORDER | changes))


def numbers(epoch: list[MiniBatch]) -> Tensor:
    """Return how many nodes of each client are in each batch."""
    found = [part.nodes for part in epoch if part.nodes is not None]
    return torch.stack([torch.stack([n.sum() for n in one.split([5, 1, 3])]) for one in found])


def test_every_node_once_an_epoch_and_nobody_steps_in_surplus_batches() -> None:
    for epoch in drawn(epochs=3):
        assert numbers(epoch).tolist() == [[3, 1, 0], [1, 0, 0]]
        assert torch.equal(sum(part.nodes.int() for part in epoch), AMONG.int())  # type: ignore[union-attr, arg-type]
        # Who has no such nodes takes the first step, as it does without batches.
        moves = [part.moves.tolist() for part in epoch if part.moves is not None]
        assert moves == [[True, True, True], [True, False, False]]


def test_without_a_size_a_step_is_on_all() -> None:
    assert drawn(size=None, epochs=2) == [[MiniBatch()], [MiniBatch()]]


def test_an_order_is_the_clients_own_and_new_in_each_epoch_round_and_purpose() -> None:
    many = torch.ones(40, dtype=torch.bool)

    def order(client: int = 4, epoch: int = 0, **changes: object) -> list[int]:
        """Return the nodes of the client's first batch of twenty, beside another client's."""
        graph: Any = SimpleNamespace(ptr=[0, 40, 80], clients=[9, client])
        both, how = torch.cat([many, many]), ORDER | {"size": 20, "epochs": 2} | changes
        epochs = list(epochs_of(graph, both, **how))
        return epochs[epoch][0].nodes[40:].nonzero().flatten().tolist()  # type: ignore[index]

    own: Any = SimpleNamespace(ptr=[0, 40], clients=[4])
    alone = next(epochs_of(own, many, **ORDER | {"size": 20}))
    assert order() == alone[0].nodes.nonzero().flatten().tolist()  # type: ignore[union-attr]
    others = [order(client=5), order(epoch=1), order(seed=2), order(server_round=3)]
    others += [order(purpose="fusion"), order()]
    assert len({tuple(one) for one in others}) == len(others)
