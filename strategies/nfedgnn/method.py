"""nFedGNN as a method: server, clients, and figures for commands."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.client.trust import trust_of
from flower_graph.config.common import LINKS, MLP, checkpoint_settings
from flower_graph.config.rules import require
from flower_graph.data.baselines import (
    Figures,
    graph_baselines,
    link_baselines,
    propagate_all_labels,
)
from flower_graph.data.description import DataForm, NewGraph, saying, tell
from flower_graph.data.features import ReadOptions, sketched
from flower_graph.data.folders import party
from flower_graph.data.graph import PARTS, Graph, labelled_split, take_rows
from flower_graph.data.sources.datasets import DRAWN, cached_data, once, read_new_graph, saved_at
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import ConfigError, DataError, RefusedError
from flower_graph.flower_compat import Mod
from flower_graph.method.base import FinishedRun, Method, Partition
from flower_graph.method.permits import ALLOW_TRUST, PLAIN
from flower_graph.models import CentralModel, SplitModel, build_server_model
from flower_graph.ops.adam import Adam
from flower_graph.outputs.client import client_folders
from flower_graph.privacy.noise import PrivateRows, client_noise
from flower_graph.records.rounds import Epoch, train_epochs
from flower_graph.rng import seeded
from flower_graph.storage.files import DATA_FOLDER, PARTITION, PARTITIONS
from flower_graph.strategies.nfedgnn.client import CommonLayerClient, NodeClient, UsersClient
from flower_graph.strategies.nfedgnn.config import (
    APP,
    FILE,
    MASKED,
    SUMMED,
    NFedGNNConfig,
    UserData,
)
from flower_graph.strategies.nfedgnn.links import held_links
from flower_graph.strategies.nfedgnn.modules import SplitPairs
from flower_graph.strategies.nfedgnn.strategy import SplitGradientRelay

ROWS_FOLDER = "rows"  # of the output folder, for users' weights in files


class NFedGNN(Method[NFedGNNConfig, SplitGradientRelay]):
    """Every node of the graph is a client."""

    name = APP
    schema = NFedGNNConfig
    client, clients = "user", "users"
    heterophily = (
        "nFedGNN smooths over edges: at homophily 0.1 it was 7 to 64 points below logistic "
        "regression on the features, with one layer for all users 6 to 55; with strategy.share=own "
        "try strategy.reg_weight=0 (`flower-graph docs results/heat-map`)"
    )
    tables = ("nfedgnn", "nfedgnn-summed", "links")
    attacks = "flower_graph.strategies.nfedgnn.attack:RelayAudit"

    def build_strategy(
        self, config: NFedGNNConfig, out: Path | None, folder: party.RunFolder | None = None
    ) -> SplitGradientRelay:
        if folder is None:
            data: Any = users_graph(config)
        else:
            classes = {"num_classes": folder.classes, "classes": folder.class_names}
            data = SimpleNamespace(**folder.tensors, **classes)
        how, is_links = config.model, config.task == LINKS
        width = how.hidden * (how.heads if how.name == "gat" else 1)  # of a row, for links
        split = split_model(config, width if is_links else int(data.num_classes))
        model: nn.Module = split
        if is_links and config.links.decoder == MLP:
            with seeded(torch.device("cpu"), config.seed, "pair-decoder"):
                model = SplitPairs(split, width)
        saving = checkpoint_settings(config, out)
        strategy = SplitGradientRelay(data, model, config, latent_size=split.latent_size, **saving)
        if config.data.add is not None or config.data.remove:
            alone = config.strategy.newcomers_alone
            strategy.grow(data, left=users_left(config, data), alone=alone)
        return strategy

    def build_client(
        self, config: NFedGNNConfig, context: Context, out: Path | None
    ) -> UsersClient:
        is_open = config.strategy.share == SUMMED and not config.masks_sums
        allowed = str(context.node_config.get(ALLOW_TRUST, "")).split(",")
        if is_open and DATA_FOLDER in context.node_config and PLAIN not in allowed:
            raise RefusedError(
                f"strategy.share={SUMMED} would show the server each SuperNode's sum of gradients, "
                f"and so a lone user's features; {ALLOW_TRUST} in this SuperNode's node config "
                f"does not have {PLAIN}: set strategy.aggregation={MASKED}"
            )
        x, users = hosted_users(config, context)
        if config.strategy.sketch is not None:
            x = sketched(x, config.strategy.sketch, config.seed)
        more = client_folders(context, out) | {"device": config.device}
        if config.strategy.share == SUMMED:
            trust = trust_of(context, hides=True) if config.strategy.distrusts else None
            more |= {"masked": config.masks_sums, "trust": trust}
            return CommonLayerClient(context, x, users, **more)
        in_file = config.strategy.state == FILE
        require(not in_file or out is not None, "strategy.state", FILE, "memory in a deployment")
        rows = out / ROWS_FOLDER if in_file and out is not None else None
        return NodeClient(context, x, users, rows_dir=rows, **more)

    def predict(
        self, config: NFedGNNConfig, run: FinishedRun, graph: NewGraph, client: int | None
    ) -> Tensor:
        """Refuse: nobody has a model that takes features and edges."""
        raise DataError(
            "a model of nFedGNN is split between server and users, who learn together: new users "
            "join the run, by `flower-graph run --resume RUN data.add=FILE rounds=N`"
        )

    def num_clients(self, config: NFedGNNConfig, folder: party.RunFolder | None = None) -> int:
        if folder is not None:
            return folder.num_clients
        graph = users_graph(config)
        return graph.num_nodes - len(users_left(config, graph))

    def baselines(self, config: NFedGNNConfig, folder: party.RunFolder | None = None) -> Figures:
        if folder is not None:
            return {}
        graph = users_graph(config)
        if config.task != LINKS:
            return graph_baselines(graph)
        split = held_links(graph.edge_index, graph.num_nodes, config)
        return link_baselines([(graph.x, split)], config.metrics[0])

    def partition(self, config: NFedGNNConfig, *, true_edges: bool = False) -> Partition:
        from flower_graph.data.partition.statistics import node_statistics

        graph = users_graph(config)
        return Partition(node_statistics(graph), party.node_data(graph), self.baselines(config))

    def train_mods(self, config: NFedGNNConfig) -> list[Mod]:
        noise = client_noise(config.privacy, config.rounds)
        return [PrivateRows(noise)] if noise else []


METHOD = NFedGNN()


def split_model(config: NFedGNNConfig, classes: int) -> SplitModel:
    """Build the server's part of the network with its first weights."""
    how = {name: getattr(config.model, name) for name in ("hidden", "heads", "dropout")}
    return build_server_model(config.model.name, classes=classes, seed=config.seed, **how)


def hosted_users(config: NFedGNNConfig, context: Context) -> tuple[Tensor, Tensor]:
    """Return the features ``[n_c, f]`` and the numbers ``[n_c]`` of a SuperNode's users."""
    folder = party.client_folder(config, context)
    if folder is not None:
        return party.read_matrix("x", folder.tensors), folder.tensors[party.USERS]
    graph, before = users_graph(config), cached_data(config).num_nodes
    here = party.share(context, before)
    users = torch.arange(here.start, here.stop)
    if graph.num_nodes == before and not config.data.remove:
        return take_rows(graph.x, here), users
    # Newcomers in turn, so that later newcomers move nobody
    part, parts = (int(str(context.node_config[key])) for key in (PARTITION, PARTITIONS))
    first, end = before + part, graph.num_nodes
    users = torch.cat([users, torch.arange(first, max(first, end), parts)])
    left = torch.tensor(users_left(config, graph), dtype=torch.int64)
    users = users[~torch.isin(users, left)]
    return take_rows(graph.x, users), users


# Users that come and go ---------------------------------------------------------------------------


def users_graph(config: NFedGNNConfig) -> Graph:
    """Return the graph of all users there ever were: users of ``data.name``, then newcomers."""
    data = config.data
    if data.add is None:
        return cached_data(config)
    path, old = Path(data.add), cached_data(config)
    assert old.treatment is not None
    form = DataForm(old.treatment, old.num_classes, old.classes, ReadOptions.of(data))

    def make() -> Graph:
        with saying(where := f"data.add {path}"):
            graph, note = _grown(old, read_new_graph(path, form), data, data.draws(config.seed))
        tell(where, [note])
        return graph

    settings = json.dumps([asdict(data), config.seed])
    return once(f"users {settings}", (saved_at(data.name), saved_at(data.add)), make)


def _grown(old: Graph, new: NewGraph, data: UserData, seed: int) -> tuple[Graph, str]:
    """Join a run's graph and a file's grown graph; newcomers become its last users."""
    # `new` has the old users by their names, or as its first nodes; these keep what is theirs.
    if new.edge_index is None:
        raise DataError("has no edges; it must be the whole grown graph")
    n, count = old.num_nodes, new.x.size(0)
    number = _numbers(old, new, data.remove)
    come = (number >= n).nonzero().flatten()
    if not come.numel():
        raise DataError(f"has {count} nodes, and none that is not in the run")
    y, drawn = new.y[come], ""
    given = {part: mask[come] for part, mask in new.masks.items() if mask is not None}
    if not given:
        draw = torch.Generator().manual_seed(seed)
        roles = labelled_split(y, data.ratios or DRAWN, generator=draw)
        given, drawn = dict(zip(PARTS, roles, strict=True)), f", drawn with seed {seed}"
    elif len(given) < len(PARTS) or any(mask.dim() != 1 for mask in given.values()):
        raise DataError(f"has masks {', '.join(given)}: give all of one split, or none")
    added = {"x": new.x[come], "y": y, **given}
    joined: dict[str, Any] = {n: torch.cat([getattr(old, n), rows]) for n, rows in added.items()}
    names, edges = new.names, number[new.edge_index]
    if names is not None:
        names = (*(old.names or names[:n]), *(names[row] for row in come.tolist()))
    edges = edges[:, torch.argsort(edges[0] * (n + come.numel()) + edges[1])]
    counts = ", ".join(f"{int(given[part].sum())} {part.partition('_')[0]}" for part in PARTS)
    note = f"{n} users of the run, {come.numel()} new: {counts}{drawn}"
    return replace(old, **joined, edge_index=edges, names=names), note


def _numbers(old: Graph, new: NewGraph, left: Sequence[str]) -> Tensor:
    """Give a file's nodes numbers: old users keep their numbers, newcomers get the next."""
    n, count = old.num_nodes, new.x.size(0)
    if old.names is not None and new.names is not None:
        place = {name: user for user, name in enumerate(old.names)}
        if missing := place.keys() - {*new.names, *left}:
            what = "give the whole grown graph, or name users that left in data.remove"
            raise DataError(f"has no node {min(missing)!r}, a user of the run: {what}")
        number = torch.tensor([place.get(name, -1) for name in new.names])
        return torch.where(number < 0, n - 1 + (number < 0).cumsum(0), number)
    if count < n:
        raise DataError(f"has {count} nodes, the run {n}: give the whole graph, old users first")
    if "x" in new.values and (other := (new.x[:n] != old.x).any(1)).any():
        node = int(other.nonzero()[0])
        raise DataError(f"node {node} has other features than in the run, whose users go first")
    return torch.arange(count)


def users_left(config: NFedGNNConfig, graph: Any) -> list[int]:
    """Return the numbers of the users that ``data.remove`` names."""
    if not (left := {*config.data.remove}):
        return []
    names = [*(getattr(graph, "names", None) or map(str, range(len(graph.y))))]
    for name in left.difference(names):
        raise ConfigError(f"data.remove: {name!r} is no user of this run")
    return [user for user, name in enumerate(names) if name in left]


def train_centralised(config: NFedGNNConfig) -> list[Epoch]:
    """Train a GCN, GAT or GraphSAGE with shared weights on the whole graph, with its masks."""
    data = cached_data(config)
    device = resolve_device(config.device)
    server = split_model(config, int(data.num_classes))
    with seeded(torch.device("cpu"), config.seed, "user-model"):
        network = CentralModel(data.x.shape[1], server, config.model.dropout).to(device)
    step = config.strategy
    optimizer = Adam(network.parameters(), lr=step.learning_rate, weight_decay=step.weight_decay)
    x, edges, y = (tensor.to(device) for tensor in (data.x, data.edge_index, data.y))
    train, *measured = (getattr(data, part).to(device) for part in PARTS)

    def epoch(number: int) -> Epoch:
        network.train()
        with seeded(device, config.seed, "centralised-dropout", number):
            logits = network(x, edges)
        loss = functional.cross_entropy(logits[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        network.eval()
        with torch.no_grad():
            right = network(x, edges).argmax(1) == y
        val, test = (int(right[mask].sum()) / int(mask.sum()) for mask in measured)
        return Epoch(loss.item(), val, test)

    return train_epochs(config.rounds, config.patience, epoch)


def propagate_labels(config: NFedGNNConfig) -> list[Epoch]:
    """Spread the server's labels: the labels for training and for the choice of a round."""
    found = propagate_all_labels(cached_data(config))
    return [Epoch(math.nan, found["val"], found["test"])]
