"""The command ``flower-graph predict``: predictions of a finished run, also for new nodes."""

import argparse
import csv
import logging
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from flower_graph.apps.cli.say import hand_over, say
from flower_graph.config.common import MLP
from flower_graph.data.sources.datasets import read_new_graph
from flower_graph.errors import ConfigError, OutputError
from flower_graph.method.run import Run, latest_in, load_run
from flower_graph.ops.counts import balanced_accuracy, confusion_of, macro_f1
from flower_graph.ops.links import dot_products
from flower_graph.outputs import files
from flower_graph.records.rounds import figure_text
from flower_graph.storage.files import named
from flower_graph.storage.reading import MOST_RECORD, read_text
from flower_graph.wire.keys import BALANCED, MACRO_F1, VALUE_SCORES

HEAD = ["client", "node", "other", "probability"]  # of a table of links
OF_CONFUSION = {MACRO_F1: macro_f1, BALANCED: balanced_accuracy}


def predict_command(args: argparse.Namespace) -> int:
    """Write or print a table of predictions."""
    logging.getLogger("flower_graph").setLevel(logging.INFO)  # what is done to the data is said
    of_party, trust = args.data_folder, args.trust_code
    run = load_run(args.run, trust=trust) if of_party is None else latest_in(of_party, trust=trust)
    if args.links != (args.node is not None or args.pairs is not None):
        raise ConfigError("--links: give --node NAME or --pairs FILE.csv with it, and only with it")
    if args.links:
        lines = link_lines(run, args)
        table = pd.DataFrame(lines, columns=HEAD)
        summary = [f"{run.path}: {len(lines):,} pairs"]
    elif args.data is not None:
        found = predict_file(run, args.data, args.client)
        table, summary = files.table_of(found), _summary_of_new(run, found)
    else:
        found = run.predictions(args.client)
        table, summary = files.table_of(found), _summary(run, found)
    if args.out is None:
        hand_over(table.to_csv(index=False))
    else:
        files.write_table(named(args.out), table)
    say(*summary, to=sys.stderr)
    return 0


def predict_file(run: Run, path: Path, client: int | None) -> files.Predictions:
    """Predict the nodes of a file's graph."""
    graph = read_new_graph(path.expanduser(), run.data)
    found = run.predict_graph(graph, client)
    if client is None:
        client = run.clients[0] if len(run.clients) == 1 else files.NO_CLIENT
    roles = np.zeros(n := len(found), np.int8)
    names = range(n) if graph.names is None else graph.names
    if run.data.scale is not None:
        return files.Predictions.of(found, client, names, roles, graph.y)
    return files.Predictions.of(found.log(), client, names, roles, graph.y, run.data.classes)


def _summary_of_new(run: Run, predictions: files.Predictions) -> list[str]:
    count, known = f"{run.path}: {len(predictions.node):,} predictions", predictions.known
    if known.any() and predictions.are_values:
        count += f"; {_errors(predictions)} on the {known.sum():,} that are known"
    elif known.any():
        right = (predictions.predicted == predictions.label)[known].mean()
        count += f"; {right:.3f} of the {known.sum():,} with a label are right"
    return [count]


def _summary(run: Run, predictions: files.Predictions) -> list[str]:
    rounds = ", ".join(map(str, run.kept_rounds))
    of = f" of round {rounds}" * bool(rounds)
    lines = [f"{run.path}: {len(predictions.node):,} predictions{of}"]
    others, *roles = files.NODE_ROLES
    parts = {role: predictions.of_role(role) for role in roles}
    if predictions.are_values:
        return lines + [f"  {r:9} {_errors(one)}" for r, one in parts.items() if len(one.node)]
    parts |= {"other nodes": predictions.of_role(others)}
    parts = {role: one for role, one in parts.items() if len(one.node)}
    shares = [f"{r} {one.accuracy():.3f} of {len(one.node):,}" for r, one in parts.items()]
    over = "means over clients and their folds, as the run reports them"
    lines += [f"  accuracy  {', '.join(shares)} ({over})"] if shares else []
    with suppress(OutputError):  # the run's settings may not be known
        for metric in filter(OF_CONFUSION.get, run.config.metrics):
            known = {r: one for r, one in parts.items() if r in roles and one.known.any()}
            shown = [f"{r} {_together(one, metric):.3f}" for r, one in known.items()]
            lines.append(f"  {metric:9} {', '.join(shown)} (of all predictions together)")
    return lines


def _together(predictions: files.Predictions, metric: str) -> float:
    pair = torch.from_numpy(predictions.predicted), torch.from_numpy(predictions.label)
    classes = 1 + int(torch.cat(pair).max())
    (confusion,) = confusion_of(*pair, [torch.arange(len(predictions.label))], classes)
    return float(OF_CONFUSION[metric](confusion))


def _errors(predictions: files.Predictions) -> str:
    pairs = zip(VALUE_SCORES, predictions.errors(), strict=True)
    return ", ".join(f"{name} {figure_text(name, value)}" for name, value in pairs)


# Links -------------------------------------------------------------------------------------------


def link_lines(run: Run, args: argparse.Namespace) -> list[list[str]]:
    """Return the lines of the requested table; ``OutputError`` if there is none."""
    rows, known = run.embeddings(args.client), run.known_links(args.client)
    pairs = None if args.pairs is None else read_pairs(args.pairs)
    lines = []
    for client in np.unique(rows.client).tolist():
        local, own = rows.of_client(client), known.of_client(client)
        place = {name: number for number, name in enumerate(local.node.astype(str).tolist())}
        if pairs is not None:
            asked = [pair for pair in pairs if set(pair) <= place.keys()]
        elif args.node in place:
            linked = own.other[own.node.astype(str) == args.node].astype(str).tolist()
            asked = [[args.node, name] for name in place if name not in (args.node, *linked)]
        else:
            continue
        ends = torch.tensor([[place[name] for name in pair] for pair in asked]).long().view(-1, 2).T
        embeddings = torch.from_numpy(local.embeddings)
        if run.config.links.decoder == MLP:  # type: ignore[attr-defined]
            with torch.no_grad():
                logits = run.model(client).decoder(embeddings, ends)  # type: ignore[operator]
        else:
            logits = dot_products(embeddings, ends)
        order = torch.arange(len(asked))
        if pairs is None:
            order = logits.argsort(descending=True)[: args.top]
        who = files.SERVER if client == files.NO_CLIENT else str(client)
        lines += [
            [who, *map(files.as_text, asked[number]), f"{float(logits[number].sigmoid()):.6g}"]
            for number in order.tolist()
        ]
    if not lines:
        what = f"node {args.node!r}" if pairs is None else f"both nodes of a pair in {args.pairs}"
        raise OutputError(f"{run.path}: no client has {what}; names are as in the run's data")
    return lines


def read_pairs(path: Path) -> list[list[str]]:
    """Read a CSV file with two names a line; a first line ``node,other`` is a header."""
    text = read_text(path.expanduser(), MOST_RECORD)
    lines = [line for line in csv.reader(text.splitlines()) if line]
    for number, line in enumerate(lines, start=1):
        if len(line) != 2:
            raise OutputError(f"{path}: line {number} has {len(line)} fields; a pair has two names")
    return [line for line in lines if line != HEAD[1:3]]
