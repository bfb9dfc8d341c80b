"""nFedGNN: the graph of a run whose users come and go."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from flower_graph.data.description import read_mask, saying, tell
from flower_graph.data.gaps import Gaps
from flower_graph.data.graph import PARTS, Graph
from flower_graph.data.new_graph import DataForm, NewGraph, read_new_graph
from flower_graph.data.sources.datasets import DRAWN, cached_data, once, saved_at
from flower_graph.data.splits import labelled_split
from flower_graph.errors import ConfigError, DataError
from flower_graph.strategies.nfedgnn.config import NFedGNNConfig, UserData


def users_graph(config: NFedGNNConfig) -> Graph:
    """Return the graph of all users there ever were: users of ``data.name``, then newcomers."""
    if config.data.add is None:
        return cached_data(config)
    add, settings = config.data.add, json.dumps([asdict(config.data), config.seed])

    saved = saved_at(config.data.name), saved_at(add)
    return once(f"users {settings}", saved, lambda: _grown(config))


def _grown(config: NFedGNNConfig) -> Graph:
    old, data = cached_data(config), config.data
    assert data.add is not None and old.treatment is not None
    path = Path(data.add)
    if not path.exists():
        raise DataError(f"data.add = {data.add!r}: there is no such file or folder")
    form = DataForm(old.treatment, old.num_classes, old.classes, Gaps.of(data))
    new = read_new_graph(path, form)
    with saying(f"data.add {path}"):
        graph, notes = grown(old, new, data, data.draws(config.seed))
    tell(f"data.add {path}", notes)
    return graph


def grown(old: Graph, new: NewGraph, data: UserData, seed: int) -> tuple[Graph, list[str]]:
    """Join a run's graph and a file's grown graph; newcomers become its last users."""
    # `new` has the old users by their names, or as its first nodes; these keep what is theirs.
    if new.edge_index is None:
        raise DataError("has no edges; it must be the whole grown graph")
    number = _numbers(old, new, data.remove)
    count, n = new.x.size(0), old.num_nodes
    come = (number >= n).nonzero().flatten()
    if not come.numel():
        raise DataError(f"has {count} nodes, and none that is not in the run")
    masks, drawn = _roles(new, come, data, seed)
    total = n + come.numel()
    train, val, test = (torch.cat([getattr(old, part), masks[part]]) for part in PARTS)
    y = torch.cat([old.y, new.y[come]])
    names = new.names
    if names is not None:
        names = (*(old.names or names[:n]), *(names[row] for row in come.tolist()))
    x, edges = torch.cat([old.x, new.x[come]]), number[new.edge_index]
    edges = edges[:, torch.argsort(edges[0] * total + edges[1])]
    graph = replace(old, x=x, y=y, edge_index=edges, names=names)
    counts = ", ".join(f"{int(masks[part].sum())} {part.partition('_')[0]}" for part in PARTS)
    return replace(graph, train_mask=train, val_mask=val, test_mask=test), [
        f"{n} users of the run, {come.numel()} new: {counts}{drawn}"
    ]


def _numbers(old: Graph, new: NewGraph, left: Sequence[str]) -> Tensor:
    """Give a file's nodes numbers: old users keep their numbers, newcomers get the next."""
    n, count = old.num_nodes, new.x.size(0)
    number = torch.arange(count)
    if old.names is not None and new.names is not None:
        place = {name: user for user, name in enumerate(old.names)}
        missing = [name for name in place.keys() - set(new.names) if name not in left]
        if missing:
            raise DataError(
                f"has no node {min(missing)!r}, who is in the run: give the whole grown graph, or "
                "name who left in data.remove"
            )
        old_number = torch.tensor([place.get(name, -1) for name in new.names])
        return torch.where(old_number < 0, n - 1 + (old_number < 0).cumsum(0), old_number)
    if count < n:
        raise DataError(
            f"has {count} nodes, the run {n}: give the whole grown graph, old users first"
        )
    if "x" in new.values:
        other = (new.x[:n] != old.x).any(1)
        if other.any():
            raise DataError(
                f"node {int(other.nonzero()[0])} has other features than in the run: old users "
                "come first, in the order of the run"
            )
    return number


def _roles(new: NewGraph, come: Tensor, data: UserData, seed: int) -> tuple[dict[str, Tensor], str]:
    notes: list[str] = []
    read = {part: read_mask(part, new.values.get(part), new.x.size(0), notes) for part in PARTS}
    given = {part: mask[come] for part, mask in read.items() if mask is not None}
    if len(given) == len(PARTS):
        if any(mask.dim() != 1 for mask in given.values()):
            raise DataError("masks of several splits: give one")
        return given, ""
    if given:
        missing = ", ".join(part for part in PARTS if part not in given)
        raise DataError(f"has {', '.join(given)}, but not {missing}: give it all three, or none")
    draw = torch.Generator().manual_seed(seed)
    masks = labelled_split(new.y[come], data.ratios or DRAWN, generator=draw)
    return dict(zip(PARTS, masks, strict=True)), f", drawn with seed {seed}"


def users_left(config: NFedGNNConfig, count: int, names: Sequence[str] | None) -> list[int]:
    """Return the numbers of the users that ``data.remove`` names."""
    if not config.data.remove:
        return []
    numbers = {name: user for user, name in enumerate(names or map(str, range(count)))}
    for name in config.data.remove:
        if name not in numbers:
            raise ConfigError(f"data.remove: {name!r} is no user of this run")
    return sorted({numbers[name] for name in config.data.remove})


def hosted_by(part: int, parts: int, before: int, total: int) -> Tensor:
    """Return the newcomers of a SuperNode: in turn, so that later newcomers move nobody."""
    return torch.arange(before + part, max(total, before + part), parts)
