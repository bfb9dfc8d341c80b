"""Splits into training, validation and test nodes: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flower_graph.data.graph import Masks
from flower_graph.errors import DataError
from flower_graph.storage.formats import read_arrays
from flower_graph.storage.reading import reading
from flower_graph.wire.keys import ROLES

ADVICE = "set data.ratios=[0.6,0.2,0.2]"
ROLE_WORDS = ("training", "validation", "test")


def random_split(
    y: Tensor,
    num_classes: int,
    *,
    train_per_class: int,
    num_val: int,
    num_test: int,
    generator: torch.Generator,
) -> Masks:
    """Draw a fixed number of training nodes of each class, then the rest by count.

    ``y`` is the class of each node, below 0 without a label, and then in no part; classes without
    any node are passed over. ``DataError`` if a class, or the rest after the training nodes, has
    too few nodes.
    """
    classes = []
    for label in range(num_classes):
        members = (y == label).nonzero().flatten()
        if 0 < members.numel() < train_per_class:
            why = f"class {label} has {members.numel()}; {ADVICE}"
            raise DataError(f"data.train_per_class = {train_per_class}: {why}")
        order = torch.randperm(members.numel(), generator=generator)
        classes.append(members[order[:train_per_class]])
    chosen, is_left = torch.cat(classes), y >= 0
    is_left[chosen] = False
    rest = is_left.nonzero().flatten()
    if (left := rest.numel()) < (wanted := num_val + num_test):
        raise DataError(f"data.num_val + data.num_test = {wanted}: {left} left; {ADVICE}")
    rest = rest[torch.randperm(rest.numel(), generator=generator)]
    return masks_from(y.numel(), [chosen, rest[:num_val], rest[num_val : num_val + num_test]])


def labelled_split(
    y: Tensor, ratios: Sequence[float], *, generator: torch.Generator, may_be_empty: bool = False
) -> Masks:
    """Draw three shares of the nodes with a label, whatever their class: ``round(share * n)`` each.

    Shares are in sum at most 1. ``DataError`` if a share is less than one node, or with
    ``may_be_empty`` at least one node for training.
    """
    labelled = (y >= 0).nonzero().flatten()
    order = labelled[torch.randperm(len(labelled), generator=generator)]
    parts = cut_by_shares(order, ratios, first=int(may_be_empty))
    if not may_be_empty and not all(map(len, parts)):
        raise DataError(f"data.ratios = {[*ratios]} leaves a part of {len(labelled)} nodes empty")
    return masks_from(y.numel(), parts)


def stratified_split(y: Tensor, ratios: Sequence[float], *, generator: torch.Generator) -> Masks:
    """Draw three shares of the nodes of each class; a share may be 0."""
    masks = torch.zeros(3, y.numel(), dtype=torch.bool)
    for label in y[y >= 0].unique().tolist():
        members = (y == label).nonzero().flatten()
        order = members[torch.randperm(members.numel(), generator=generator)]
        for mask, part in zip(masks, cut_by_shares(order, ratios), strict=True):
            mask[part] = True
    return Masks(*masks)


def cut_by_shares(order: Tensor, shares: Sequence[float], *, first: int = 0) -> list[Tensor]:
    """Cut a list of nodes into three shares, the first of at least so many nodes."""
    # Rounding the running sum, so that shares that sum to 1 cover every node.
    count = order.numel()
    ends = [min(count, max(first, round(count * sum(shares[: k + 1])))) for k in range(3)]
    return [order[start:end] for start, end in zip([0, *ends[:2]], ends, strict=True)]


def check_roles(client: int, masks: Iterable[Tensor], ratios: Sequence[float]) -> None:
    """Check that a client has nodes in every role that is to have some."""
    for role, mask, share in zip(ROLE_WORDS, masks, ratios, strict=True):
        if share > 0 and not mask.any():
            raise DataError(f"client {client}: none of its {mask.numel()} nodes is for {role}")


def select_column(masks: Masks, seed: int) -> Masks:
    """Choose one split where a data set has several.

    Masks ``[n]`` stay as they are; of masks ``[n, k]`` the column ``seed % k``.
    """
    columns = {mask.size(1) for mask in masks if mask.dim() == 2}
    if len(columns) > 1:
        raise DataError(f"masks have different numbers of splits: {sorted(columns)}")
    return Masks(*((m[:, seed % m.size(1)] if m.dim() == 2 else m).bool() for m in masks))


def geom_gcn_split(path: Path, num_nodes: int) -> Masks:
    """Read one split file of geom-gcn, an npz; some of them leave nodes out.

    ``DataError`` if it cannot be read or does not fit the graph.
    """
    why = "cannot be read: it is damaged or no npz file; copy it again"
    with reading(f"split file {path}", DataError, why):
        masks = read_arrays(path)
        arrays = [masks[f"{part}_mask"] for part in ROLES]
    for array in arrays:
        if array.shape != (num_nodes,):
            raise DataError(f"split file {path} has masks {array.shape}, not ({num_nodes},)")
    return Masks(*(torch.from_numpy(array.astype(bool)) for array in arrays))


def masks_from(num_nodes: int, parts: Sequence[Tensor]) -> Masks:
    """Give the masks of three lists of nodes."""
    masks = [torch.zeros(num_nodes, dtype=torch.bool) for _ in parts]
    for mask, members in zip(masks, parts, strict=True):
        mask[members] = True
    return Masks(*masks)
