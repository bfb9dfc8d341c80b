"""Trackers: TensorBoard, MLflow, and Weights & Biases. Their failures do not reach the run."""

import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flower_graph.config.schema import flatten
from flower_graph.errors import OutputError, one_line
from flower_graph.records.rounds import RoundReport
from flower_graph.storage.files import make_folder, write_json
from flower_graph.storage.reading import Tree, read_json, reading

LOG = logging.getLogger(__name__)
PROJECT = "flower-graph"  # the experiment or project that runs are listed in
IDS = "trackers.json"  # in a run's folder: the names that trackers gave to the run
FOLDER = "tensorboard"  # in a run's folder: TensorBoard's event files
PATHS = ("/", "~", ".")  # how they begin
SECRET = ("data.root", "strategy.registry")  # where files of this machine lie
DEFAULTS = {
    # A server that is away holds up one round by seconds, not each by minutes; files need none.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",  # reports of errors have paths
}
MOST_PARAMS = 100  # that MLflow takes at once


@dataclass
class Tracker:
    """One tracker's record of one run. Its errors end the tracking, not the run."""

    out: Path  # the run's folder
    beside: Path  # the folder that holds what its command wrote
    name: str
    group: str  # the same for all seeds of a command
    settings: Mapping[str, object]  # by dotted key, without what others must not see
    first_round: int  # that will be shown; above 1 in a resumed run
    identity: str | None  # that the tracker gave to the run; known at the start of a resumed run

    def start(self) -> None:
        """Start the record, or go on in it."""

    def log(self, server_round: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a round."""

    def finish(self, final: Mapping[str, float] | None) -> None:
        """End the record, with the final figures, ``final/NAME``; None if the run stopped early."""


class TensorBoard(Tracker):
    """A run in TensorBoard; ``tensorboard --logdir`` shows all runs and seeds below a folder."""

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Rounds that a resumed run does again replace those that were shown.
        again = self.first_round if self.first_round > 1 else None
        make_folder(self.out / FOLDER)  # a link is refused
        self._writer = SummaryWriter(str(self.out / FOLDER), purge_step=again)

    def log(self, server_round: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, server_round)
        self._writer.flush()

    def finish(self, final: Mapping[str, float] | None) -> None:
        if final is not None:  # the tab HPARAMS compares settings and final figures of runs
            settings = {key: str(value) for key, value in self.settings.items()}
            self._writer.add_hparams(settings, final, run_name=".")
        self._writer.close()


class MLflow(Tracker):
    """A run in MLflow, in the experiment ``flower-graph``; its tag ``group`` is common to seeds.

    The server is that of ``MLFLOW_TRACKING_URI``, else the folder ``mlruns`` beside the run.
    """

    def start(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        address = os.environ.get("MLFLOW_TRACKING_URI") or (self.beside / "mlruns").as_uri()
        self._client = MlflowClient(address)
        if self.identity is not None:
            self._client.update_run(self.identity, "RUNNING")
            return
        named = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self._client.get_experiment_by_name(named)
        number = experiment.experiment_id if experiment else self._client.create_experiment(named)
        made = self._client.create_run(number, tags={"group": self.group}, run_name=self.name)
        self.identity = str(made.info.run_id)
        params = [Param(key, str(value)) for key, value in self.settings.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self.identity, params=params[first : first + MOST_PARAMS])

    def log(self, server_round: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(re.sub(r"[^\w\-. /]", "_", name), value, now, server_round)
            for name, value in figures.items()
        ]
        self._client.log_batch(self.identity, metrics=metrics)

    def finish(self, final: Mapping[str, float] | None) -> None:
        if final is not None:
            self.log(0, final)
        self._client.set_terminated(self.identity, "KILLED" if final is None else "FINISHED")


class WeightsAndBiases(Tracker):
    """A run in Weights & Biases, in the project ``flower-graph``; seeds are one group.

    The library's environment variables hold; without a network ``WANDB_MODE=offline``.
    """

    def start(self) -> None:
        import wandb

        self.identity = self.identity or secrets.token_hex(4)
        # By default it sends the command, the machine's name and figures, code and output
        quiet = dict.fromkeys(("silent", "disable_code", "disable_git", "x_disable_meta"), True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=self.identity,
            name=self.name,
            group=self.group,
            config=dict(self.settings),
            dir=str(self.out),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", x_disable_stats=True, **quiet),
        )
        # Its own steps only grow, and a resumed run does some rounds again.
        self._run.define_metric("*", step_metric="round")

    def log(self, server_round: int, figures: Mapping[str, float]) -> None:
        self._run.log({"round": server_round, **figures})

    def finish(self, final: Mapping[str, float] | None) -> None:
        if final is not None:
            self._run.summary.update(final)
        self._run.finish(exit_code=int(final is None))


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


class Trackers:
    """The trackers of one run, started with its first round."""

    def __init__(self, names: Sequence[str], out: Path, config: Tree, title: str = "") -> None:
        self._waiting, self._out, self._config, self._title = names, out, config, title
        self._active: dict[str, Tracker] = {}

    def see(self, report: RoundReport) -> None:
        # Not earlier: a run that fails before its first round leaves nothing, anywhere.
        names, self._waiting = self._waiting, ()
        if names:
            self._start(names, report.round)
        # Participants' names and reasons are no numbers
        self._call("log", report.round, numbers(flatten(report.to_record())))

    def finish(self, result: Mapping[str, object] | None) -> None:
        final = None
        if result is not None:
            final = numbers((f"final/{name}", value) for name, value in result.items())
        self._call("finish", final)
        self._active = {}

    def _start(self, names: Sequence[str], first_round: int) -> None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        known, path = dict[str, str](), self._out / IDS
        if first_round > 1 and path.is_file():
            with reading(path, OutputError, "not the identities of trackers"):
                known = {str(name): str(identity) for name, identity in read_json(path).items()}
        # `flower-graph run --seeds` makes a folder `seed-N` for each seed.
        is_one_of_several = self._out.name == f"seed-{self._config.get('seed')}"
        top = self._out.parent if is_one_of_several else self._out
        label = str(self._out.relative_to(top.parent))
        settings = visible({"config": self._title, **self._config})
        about = self._out, top.parent, label, top.name, settings, first_round
        self._active = {name: TRACKERS[name](*about, known.get(name)) for name in names}
        self._call("start")
        known |= {name: one.identity for name, one in self._active.items() if one.identity}
        if known:
            write_json(path, known)

    def _call(self, action: str, *given: object) -> None:
        """Call all trackers; if one fails, warn and drop it for this run."""
        for name, tracker in [*self._active.items()]:
            try:
                getattr(tracker, action)(*given)
            except Exception as error:
                # An address may have a password
                words = "" if "@" in str(error) else f": {one_line(str(error))}"
                why = f"{type(error).__name__}{words}"
                LOG.warning("track: %s failed and is left out from here on: %s", name, why)
                del self._active[name]


def numbers(entries: Iterable[tuple[str, object]]) -> dict[str, float]:
    """Return the entries that are finite numbers; dots in their names become slashes."""
    return {
        name.replace(".", "/"): float(value)
        for name, value in entries
        if isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
    }


def visible(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by dotted key; of paths only the last name, and no paths of keys or files."""
    return {
        key: Path(value).name if isinstance(value, str) and value.startswith(PATHS) else value
        for key, value in flatten(settings)
        if key not in SECRET
    }
