"""The command ``flower-graph predict``: a run's predictions, or those of nodes it has not seen."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from flower_graph.data.new_graph import read_new_graph
from flower_graph.outputs.files import NO_CLIENT, Predictions, table_of, table_text
from flower_graph.outputs.run import Run, latest_in, load_run
from flower_graph.storage.files import write_text


def predict_command(args: argparse.Namespace) -> int:
    """Write or print a table of predictions."""
    logging.getLogger("flower_graph").setLevel(logging.INFO)  # what is done to the data is said
    run = load_run(args.run) if args.data_folder is None else latest_in(args.data_folder)
    if args.data is None:
        found = run.predictions(args.client)
    else:
        found = predict_file(run, args.data, args.client)
    text = table_text(*table_of(found))
    if args.out is None:
        print(text, end="", flush=True)
    else:
        write_text(args.out.expanduser(), text)
    print(_said(run, found), file=sys.stderr)
    return 0


def predict_file(run: Run, path: Path, client: int | None) -> Predictions:
    """Predict the nodes of a file's graph."""
    graph = read_new_graph(path.expanduser(), run.data)
    probability = run.predict_graph(graph, client)
    n = len(probability)
    return Predictions.of(
        probability.log(),
        NO_CLIENT if client is None else client,
        range(n) if graph.names is None else graph.names,
        [0] * n,
        graph.y,
        run.data.classes,
    )


def _said(run: Run, found: Predictions) -> str:
    """Say what is in the table."""
    known = found.label >= 0
    right = (found.predicted == found.label)[known].mean() if known.any() else None
    end = "" if right is None else f"; {right:.3f} of the {known.sum()} with a label are right"
    return f"{run.path}: {len(found.node)} predictions{end}"
