"""``flower_graph.run``: the command ``flower-graph run`` for Python."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flower_graph.apps.cli.main import make_parser
from flower_graph.apps.cli.run import run_all
from flower_graph.config.foreign import OWN
from flower_graph.data.sources.datasets import with_saved_graphs
from flower_graph.engine.machine import waiting_threads
from flower_graph.method.load import as_overrides
from flower_graph.method.run import Run, load_run
from flower_graph.records.rounds import RoundReport

__all__ = ["run"]

GRAPHS = "graphs"  # folder of graphs that Python gave


def run(
    config: str,
    overrides: Mapping[str, object] | Sequence[str] | None = None,
    *,
    seed: int | Sequence[int] | None = None,
    out: Path | str | None = None,
    overwrite: bool = False,
    supernodes: int | None = None,
    quiet: bool = False,
    on_round: Callable[[RoundReport], None] | None = None,
    track: Sequence[str] = (),
) -> Run:
    """Train with a config in this process, as ``flower-graph run`` does, with the same checks.

    Parameters
    ----------
    config : str
        A shipped config, such as ``"fedgls/cora-linqs"``, or the path of a YAML file.
    overrides : mapping or sequence of str, optional
        Changed settings, nested or by dotted key: ``{"rounds": 20, "model.name": "gat"}``; or
        words as for the command: ``["rounds=20"]``. ``data.name`` may also be a graph: a PyG
        ``Data`` or a graph of NetworkX or igraph. It is written to the folder ``graphs`` beside
        the run's folder.
    seed : int or sequence of int, optional
        The seed of the run, or the seeds of several; default: the config's.
    out : Path or str, optional
        A new folder for all outputs; default: ``runs/CONFIG-TIME``.
    overwrite : bool
        Whether a run in ``out`` is deleted first; any other folder with files is refused.
    supernodes : int, optional
        The number of SuperNodes, over which clients are assigned.
    quiet : bool
        Whether nothing is shown. By default a terminal or notebook shows a bar, otherwise stderr
        gets a line for each round.
    on_round : callable, optional
        Called with every round's report, one seed after the other; an error in it ends the run.
    track : sequence of str
        Trackers of the run, as in the setting ``track``: ``"tensorboard"``,
        ``"mlflow"``, ``"wandb"``.

    Returns
    -------
    Run
        The run, read from its folder. Its dict ``seeds`` has the run of each seed: after
        ``seed=(3, 4)`` it has ``seeds[3]`` and ``seeds[4]``.

    Raises
    ------
    ConfigError, DataError, OutputError
        In the cases in which the command fails with them.
    """
    if isinstance(overrides, Mapping):
        folder = Path("runs") if out is None else Path(out).expanduser().parent
        overrides = with_saved_graphs(overrides, folder / GRAPHS)
    words = as_overrides(overrides) + ([f"track=[{','.join(track)}]"] if track else [])
    seeds = [seed] if isinstance(seed, int) else seed
    args = make_parser().parse_args(["run"])  # each option's default
    args.config, args.overrides, args.seeds = config, words, None if seeds is None else list(seeds)
    args.out, args.overwrite = None if out is None else Path(out), overwrite
    args.supernodes, args.quiet, args.on_round = supernodes, quiet, on_round
    with waiting_threads():
        return load_run(run_all(args)[0], trust=OWN)
