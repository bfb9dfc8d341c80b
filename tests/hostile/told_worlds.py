"""The methods whose requests are told otherwise, each with a victim that has two kinds of data."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ego_helpers import SETTINGS
from party_helpers import write_keys
from public_helpers import ToyModel
from told_otherwise import VICTIM, Entry, TellsOtherwise, World

from flower_graph import EgoNetworkClient, MaskedEmbeddingAveraging
from flower_graph.client.adaptor import make_client_app
from flower_graph.client.state import forget_run
from flower_graph.data.graph import to_undirected
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.secure.align import blinded
from flower_graph.secure.client import SecureSumClient
from flower_graph.secure.parties import alignment
from flower_graph.secure.parties import messages as of_parties
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.sum import messages as of_sums
from flower_graph.secure.sum.service import SecureSum
from flower_graph.strategies.fedscem import messages as of_egos
from flower_graph.strategies.ppfl import claims
from flower_graph.strategies.ppfl import messages as of_public
from flower_graph.strategies.ppfl.cohort_client import EmbeddingClient
from flower_graph.strategies.ppfl.secure_consensus import SecureConsensus
from flower_graph.strategies.ppfl.secure_consensus_client import (
    SecureConsensusClient,
)
from flower_graph.wire.exchange import Exchange

COUNT = 7  # SuperNodes, of one client each: with seven a sum can do without two
PAIRS, HOLDS, HIDDEN = 30, 15, 72  # of identities; the victim has one of each, others some
PUBLIC, DIMENSION = 70, 64
TIMEOUT, REGISTRY = 0.2, "registry.json"
LENGTH, LIMIT = 4096, 100.0  # of sums of vectors
# Of models that are shared
NEVER_EGOS = frozenset({"EgoRequest.model/first", "EgoRequest.model/rest"})


def victims_egos(kind: int) -> list[EgoNetwork]:
    """Make clients; of each pair of identities, which all others hold together, the victim has one.

    So its two kinds of data hold as many identities, each of as many holders.
    """
    held = np.zeros((COUNT, PAIRS), np.bool_)
    for place in range(COUNT):  # in turn, so that several hold each
        held[place, (np.arange(HOLDS) + 2 * place * HOLDS // 3) % PAIRS] = True
    assert held[1:].sum(0).min() > 1
    return [ego_of(place, held[place], kind) for place in range(COUNT)]


def ego_of(place: int, held: Any, kind: int) -> EgoNetwork:
    """Make a client; the names of its nodes are words that can be looked for."""
    if place == VICTIM:
        nodes = 2 * np.arange(PAIRS) + kind
    else:
        nodes = np.concatenate([2 * np.flatnonzero(held), 2 * np.flatnonzero(held) + 1])
    chance = torch.Generator().manual_seed(100 * place + kind * (place == VICTIM))
    count = nodes.size
    x = torch.rand(count, SETTINGS.num_features, generator=chance)
    edge = to_undirected(torch.randint(count, (2, 2 * count), generator=chance), count)
    y = torch.arange(count) % SETTINGS.num_classes
    role = torch.arange(count) % 3
    ids = torch.from_numpy(10**9 + nodes)
    return EgoNetwork(2 * place, int(ids[0]), ids, edge, x, y, *(role == k for k in range(3)))


def trust_in(context: Any, keys: Path | None) -> TrustSettings | None:
    """Give a SuperNode its key of a folder, if there is one."""
    if keys is None:
        return None
    place = int(context.node_config["partition-id"])
    files = {"identity-key": str(keys / f"key-{place}"), "registry": str(keys / REGISTRY)}
    return TrustSettings.of(files, context.run_id)


def egos_app(kind: int, keys: Path | None, form: str = "psi") -> Any:
    """Make FedSCem's clients, which distrust the server if there are keys."""
    egos = victims_egos(kind)

    def client_fn(context: Any) -> EgoNetworkClient:
        own = [egos[int(context.node_config["partition-id"])]]
        trust = trust_in(context, keys)
        return EgoNetworkClient(context, own, trust=trust, masked=True, alignment=form)

    return make_client_app(client_fn)


def egos_server(keys: Path | None, form: str = "psi") -> MaskedEmbeddingAveraging:
    """Make FedSCem's server."""
    settings = SETTINGS._replace(hidden=HIDDEN)
    registry = None if keys is None else keys / REGISTRY
    return MaskedEmbeddingAveraging(settings, alignment=form, registry=registry)


def member(place: int, kind: int, model: Any = ToyModel) -> EmbeddingClient:
    """Make a client all of whose nodes are public."""
    chance = np.random.default_rng((place, kind * (place == VICTIM)))
    start = chance.normal(size=(PUBLIC, DIMENSION)).astype(np.float32)
    nodes = np.arange(PUBLIC)
    return EmbeddingClient(2 * place, nodes, nodes, DIMENSION, partial(model, start), judge)


def judge(embeddings: Any, server_round: int, is_last: bool) -> dict[str, float]:
    """Measure something of a client's own embeddings."""
    return {"val": 0.5, "test": float((embeddings > 0).mean())}


def public_app(kind: int, keys: Path | None, model: Any = ToyModel) -> Any:
    """Make PPFL-GNN's clients, which distrust the server if there are keys."""

    def client_fn(context: Any) -> SecureConsensusClient:
        place = int(context.node_config["partition-id"])
        local = [member(place, kind, model)]
        return SecureConsensusClient(context, local, trust=trust_in(context, keys))

    return make_client_app(client_fn)


def public_server(keys: Path | None) -> SecureConsensus:
    """Make PPFL-GNN's server."""
    return SecureConsensus(registry=None if keys is None else keys / REGISTRY, min_nodes=5)


class Method(World):
    """A method whose SuperNodes have keys that no run has used."""

    trusted, rounds = False, 2
    form = "psi"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        write_keys(COUNT, folder)
        super().__init__()

    def start(self, kind: int, begin: Callable[[TellsOtherwise], None]) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder.parent) as name:
            keys = shutil.copytree(self._folder, Path(name) / "keys")
            given = None if self.trusted else keys
            grid = TellsOtherwise(self.app(kind, given), num_supernodes=COUNT)
            begin(grid)
            try:
                self.server(given).start(grid, num_rounds=self.rounds, timeout=TIMEOUT)
            finally:
                forget_run(grid.run.run_id)

    def app(self, kind: int, keys: Path | None) -> Any:
        """Make the clients."""
        return egos_app(kind, keys, self.form)

    def server(self, keys: Path | None) -> Any:
        """Make the server."""
        return egos_server(keys, self.form)


class FedSCem(Method):
    """Embedding averaging whose server may lie."""

    modules = (of_egos, blinded, alignment)
    # And what the trusted form of the alignment has
    never = NEVER_EGOS | frozenset(
        f"{one}.align-{key}"
        for one, keys in {
            "EvaluateRequest": ("clients", "epoch", "points", "stage"),
            "UnionRequest": ("cells", "clients", "epoch", "points", "sizes", "stage"),
        }.items()
        for key in keys
    )


class TrustedFedSCem(Method):
    """Likewise, where the server is trusted to keep to the protocol."""

    trusted = True
    modules = (of_egos, blinded)
    never = NEVER_EGOS | {"EgoRequest.sums-checks", "EgoRequest.sums-members"}


class PublicNodes(Method):
    """PPFL-GNN's secure consensus whose server may lie."""

    modules, rounds = (of_public, claims), 3

    def app(self, kind: int, keys: Path | None) -> Any:
        return public_app(kind, keys)

    def server(self, keys: Path | None) -> Any:
        return public_server(keys)


class TrustedPublicNodes(PublicNodes):
    """Likewise, where the server is trusted; it is told what each client measured."""

    trusted, tells_figures = True, True
    modules = (of_public,)


class Summing:
    """The server's half of sums of vectors, as a strategy that can be started."""

    def __init__(self, keys: Path | None) -> None:
        self._server = None if keys is None else PartySums(keys / REGISTRY)

    def start(self, grid: Any, num_rounds: int, timeout: float) -> None:
        exchange = Exchange(grid)
        secure = SecureSum(exchange, limit=LIMIT, server=self._server, guard=True, timeout=20)
        for number in range(1, num_rounds + 1):
            secure.sum(number, LENGTH)


def vector(place: int, number: int, kind: int) -> Any:
    """Draw a SuperNode's numbers in a sum; the victim has two kinds, within the limit."""
    kind *= place == VICTIM
    return np.random.default_rng((place, number, kind)).normal(size=LENGTH) * (15 if kind else 1)


class Sums(Method):
    """A sum of vectors whose server may lie."""

    modules = (of_sums, of_parties)
    # What a trusted server says, and what an alignment has besides
    never = frozenset({"KeyRequest.sum-run", "RevealRequest.reveal-declared"})

    @staticmethod
    def _below() -> set[str]:
        return set()

    @classmethod
    def requests(cls) -> dict[str, Entry]:
        """Give the entries of the messages, and those of the ring that travels with them."""
        rings = [Entry(of_sums.MaskRequest, one.key, one) for one in of_sums.RING.parts.values()]
        return super().requests() | {str(entry): entry for entry in rings}

    def app(self, kind: int, keys: Path | None) -> Any:
        asked = Counter[int]()

        class Vectors(SecureSumClient):
            def vectors(self, config: Any) -> Any:
                place = self.clients[0] // 2
                asked[place] += 1
                own, rest = vector(place, asked[place], kind), np.zeros(LENGTH)
                return dict(zip(self.clients, (own, rest), strict=True))

        def client_fn(context: Any) -> Vectors:
            place = int(context.node_config["partition-id"])
            if keys is not None:
                files = {"identity-key": keys / f"key-{place}", "registry": keys / REGISTRY}
                context.node_config |= {key: str(file) for key, file in files.items()}
            return Vectors(context, [2 * place, 2 * place + 1])

        return make_client_app(client_fn)

    def server(self, keys: Path | None) -> Any:
        return Summing(keys)


class TrustedSums(Sums):
    """Likewise, where the server is trusted."""

    trusted = True
    modules = (of_sums,)
    never = frozenset()


WORLDS = {
    "sum": Sums,
    "sum, trusted": TrustedSums,
    "FedSCem": FedSCem,
    "FedSCem, trusted": TrustedFedSCem,
    "PPFL-GNN": PublicNodes,
    "PPFL-GNN, trusted": TrustedPublicNodes,
}
