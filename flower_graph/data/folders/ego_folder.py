"""FedSCem's clients with graphs of their own: their nodes' identities and masks.

Clients are numbered in the order of the files' names, and nodes stay in the order of the file.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from flower_graph.config.common import AS_IS
from flower_graph.config.partition import GLOBAL
from flower_graph.data.description import saying, tell
from flower_graph.data.folders.client_folder import (
    ClientFile,
    Clients,
    ego_of,
    identities_of,
    read_clients,
    told,
)
from flower_graph.data.folders.overlapping_folder import Holder, common_roles
from flower_graph.data.gaps import NO_GAPS, Gaps
from flower_graph.data.partition.ego_networks import EgoNetwork, split_per_client
from flower_graph.data.splits import Masks, with_masks


def load_ego_folder(
    path: Path | str,
    split: str,
    ratios: Sequence[float],
    seed: int,
    *,
    features: str = AS_IS,
    gaps: Gaps = NO_GAPS,
) -> Clients[EgoNetwork]:
    """Load one client from each graph of a folder, or of a file whose nodes name their client.

    Nodes have an ``identity`` (words, or int64), an ``n_id`` (int64) or ``names``. Clients without
    masks are split by ``ratios`` and ``seed``, ``per-client`` or ``global``. ``DataError`` names
    file, client and what is allowed.
    """
    files = read_clients(path, features, gaps)
    egos: list[EgoNetwork] = []
    for client, (file, who) in enumerate(zip(files, identities_of(files), strict=True)):
        with saying(file.where):
            egos.append(ego_of(client, file.found, who))
    egos = _split(files, egos, split, ratios, seed)
    _warn(path, egos)
    return told(path, files, egos)


def _split(
    files: Sequence[ClientFile],
    egos: list[EgoNetwork],
    split: str,
    ratios: Sequence[float],
    seed: int,
) -> list[EgoNetwork]:
    own = [any(mask is not None for mask in file.found.masks.values()) for file in files]
    if split != GLOBAL:
        drawn = split_per_client(egos, ratios, seed)
        return [mine if has else new for has, mine, new in zip(own, egos, drawn, strict=True)]
    numbers: dict[int | str, int] = {}
    holders = []
    for file, has, ego in zip(files, own, egos, strict=True):
        ids = [numbers.setdefault(one, len(numbers)) for one in ego.identities]
        masks = Masks(ego.train_mask, ego.val_mask, ego.test_mask) if has else None
        holders.append(Holder(file.where, torch.tensor(ids), ego.y, masks, ego.identities))
    roles = common_roles(holders, ratios, seed)
    return [with_masks(ego, masks) for ego, masks in zip(egos, roles, strict=True)]


def _warn(path: Path | str, egos: Sequence[EgoNetwork]) -> None:
    held: list[int | str] = [one for ego in egos for one in ego.identities]
    if len(set(held)) == len(held) and len(egos) > 1:
        tell(
            f"data {path}",
            ["no two clients hold the same node (identity): nothing is shared, each trains alone"],
            logging.WARNING,
        )
