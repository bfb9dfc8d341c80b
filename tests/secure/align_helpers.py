"""One alignment in memory: hosts, a server, and everything that the server receives."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import alignment
from benchmarks.alignment import Data

RUN = b"run-1"
DATA = {0: [1, 2, 3], 5: [3, 4], 2: [7, 2, 3, 9]}
FORMS = ("psi", "plain")


class Alignment(alignment.Alignment):
    """Nodes 1, 2, ... whose hosts are written to bytes and read again between messages."""

    first = 1  # number of the first node

    def __init__(
        self, data: Data, nodes: Sequence[Sequence[int]], *given: Any, **more: Any
    ) -> None:
        super().__init__(data, dict(enumerate(nodes, self.first)), *(given or (RUN,)), **more)

    def reply(self, node: int, config: dict[str, Any]) -> dict[str, Any]:
        """Let a host answer, from its state as bytes."""
        self.hosts[node] = self.host(node, self.hosts[node].to_bytes())
        return super().reply(node, config)

    def slots(self) -> dict[object, int]:
        """Return the slot of every identity, after checking that all holders agree."""
        found: dict[object, int] = {}
        for host in self.hosts.values():
            for client, slots in host.slots.by_client.items():
                for identity, slot in zip(self.data[client], slots.tolist(), strict=True):
                    assert found.setdefault(identity, slot) == slot
        return found

    def agree(self, clients: Iterable[int]) -> bool:
        """Whether slots are numbered through, and are those that these clients share."""
        present = {client: self.data[client] for client in clients}
        placed = {identity: slot for identity, slot in self.slots().items() if slot >= 0}
        numbered = sorted(placed.values()) == list(range(len(placed)))
        aligned = self.server.aligned == sorted(present)
        return numbered and aligned and placed.keys() == shared(present)


def aligned(data: Data, nodes: Sequence[Sequence[int]], run_id: bytes = RUN) -> Alignment:
    """Align all."""
    alignment = Alignment(data, nodes, run_id)
    alignment.align()
    return alignment


def shared(data: Data) -> set[object]:
    """Return the identities that at least two clients hold."""
    everything = [identity for own in data.values() for identity in own]
    return {identity for identity in everything if everything.count(identity) > 1}
