"""MLflow: the server that ``MLFLOW_TRACKING_URI`` names, else ``mlruns`` beside the run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping

from flower_graph.report.trackers.base import PROJECT, Subject

ADDRESS, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"
# A server that is away holds up one round by seconds, not each by minutes; files need no server.
USUAL = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
MOST_PARAMS = 100  # that MLflow takes at once


class MLflow:
    """A run in MLflow, in the experiment ``flower-graph``; its tag ``group`` is common to seeds."""

    def __init__(self, subject: Subject) -> None:
        for name, value in USUAL.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        address = os.environ.get(ADDRESS) or (subject.beside / "mlruns").as_uri()
        self._client = MlflowClient(address)
        if subject.known_as is not None:
            self.identity = subject.known_as
            self._client.update_run(self.identity, "RUNNING")
            return
        named = os.environ.get(EXPERIMENT) or PROJECT
        experiment = self._client.get_experiment_by_name(named)
        number = experiment.experiment_id if experiment else self._client.create_experiment(named)
        tags = {"group": subject.group}
        run = self._client.create_run(number, tags=tags, run_name=subject.name)
        self.identity = run.info.run_id
        params = [Param(key, str(value)) for key, value in subject.settings.items()]
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
            self.log(0, {f"final/{name}": value for name, value in final.items()})
        self._client.set_terminated(self.identity, "KILLED" if final is None else "FINISHED")


def start(subject: Subject) -> MLflow:
    """Start the record of a run, or go on in it."""
    return MLflow(subject)
