"""``flower-graph predict --links``: partners of a node, or the probability of given pairs."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from flower_graph.config.module import MLP
from flower_graph.errors import OutputError
from flower_graph.method.run import Run
from flower_graph.ops.links import dot_products
from flower_graph.outputs.files import NO_CLIENT, SERVER, quoted
from flower_graph.outputs.links import Decoder, best_partners
from flower_graph.storage.reading import MOST_RECORD, read_text

HEAD = ["client", "node", "other", "probability"]


def link_lines(run: Run, args: argparse.Namespace) -> list[list[str]]:
    """Return the lines of the requested table; ``OutputError`` if there is none."""
    rows, known = run.embeddings(args.client), run.known_links(args.client)
    pairs = read_pairs(args.pairs) if args.pairs is not None else None
    lines = []
    for client in np.unique(rows.client).tolist():
        local, own = rows.of_client(client), known.of_client(client)
        names = local.node.astype(str)
        place = {name: number for number, name in enumerate(names.tolist())}
        table, decoder = torch.from_numpy(local.embeddings), decoder_of(run, client)
        if pairs is None:
            if args.node not in place:
                continue
            linked = own.other[own.node.astype(str) == args.node].astype(str).tolist()
            found = _partners(table, place, args.node, linked, args.top, decoder)
            scored: Iterator[tuple[str, str, float]] = (
                (args.node, names[other], score) for other, score in found
            )
        else:
            here = [pair for pair in pairs if set(pair) <= place.keys()]
            places = [place[name] for pair in here for name in pair]
            among = torch.tensor(places, dtype=torch.int64).view(-1, 2)
            chances = decoder(table, among.T).sigmoid().tolist()
            scored = ((*pair, chance) for pair, chance in zip(here, chances, strict=True))
        who = SERVER if client == NO_CLIENT else str(client)
        lines += [[who, quoted(one), quoted(other), f"{p:.6g}"] for one, other, p in scored]
    if not lines:
        what = f"node {args.node!r}" if pairs is None else f"both nodes of a pair in {args.pairs}"
        raise OutputError(f"{run.path}: no client has {what}; names are as in the run's data")
    return lines


def _partners(
    rows: Tensor,
    place: dict[str, int],
    node: str,
    linked: list[str],
    count: int,
    decoder: Decoder,
) -> list[tuple[int, float]]:
    """Return indices and probabilities of the most likely partners that are not linked."""
    known = torch.tensor([place[name] for name in linked], dtype=torch.int64)
    best, logits = best_partners(rows, known, place[node], count, decoder)
    return list(zip(best.tolist(), logits.sigmoid().tolist(), strict=True))


def decoder_of(run: Run, client: int) -> Decoder:
    """Return the function from pairs to logits: the dot product, or a client's decoder."""
    if run.config.links.decoder != MLP:  # type: ignore[attr-defined]
        return dot_products
    decoder: nn.Module = run.model(client).decoder  # type: ignore[assignment]
    return torch.no_grad()(decoder)


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Read a CSV file with two names a line; a first line ``node,other`` is a header."""
    lines = [
        line for line in csv.reader(read_text(path.expanduser(), MOST_RECORD).splitlines()) if line
    ]
    for number, line in enumerate(lines, start=1):
        if len(line) != 2:
            raise OutputError(f"{path}: line {number} has {len(line)} fields; a pair has two names")
    return [(one, other) for one, other in lines if [one, other] != HEAD[1:3]]
