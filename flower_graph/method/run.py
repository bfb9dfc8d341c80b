"""Reads a run's folder: figures, predictions, models; and predicts with them.

Only ``Run.predict``, which uses the run's method, needs Flower.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from flower_graph.config import foreign
from flower_graph.config.common import RunConfig
from flower_graph.config.foreign import NOBODY, Trust
from flower_graph.data.description import DataForm, NewGraph, new_graph
from flower_graph.errors import OutputError, brief
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of
from flower_graph.outputs.build import build_module
from flower_graph.outputs.files import (
    NO_CLIENT,
    SAID,
    Embeddings,
    KnownLinks,
    Predictions,
    Rounds,
    Rows,
    SavedModels,
    read_models,
)
from flower_graph.records.rounds import read_reports
from flower_graph.storage.files import plain
from flower_graph.storage.reading import Tree, read_json, reading

__all__ = ["Rounds", "Run", "latest_in", "load_run"]

OUTPUTS = "outputs"  # of a SuperNode's folder
T = TypeVar("T", bound=Rows)


class Run:
    """One run, or one for each of several seeds, as ``load_run`` reads it.

    Attributes
    ----------
    path : Path
        The folder.
    seeds : dict of int to Run
        The run of each seed, by the seed and not by its place: after ``seed=(3, 4)`` ``seeds[3]``
        and ``seeds[4]``; a single run has itself by its own seed.
    """

    def __init__(self, path: Path | str, trust: Trust = NOBODY, *, is_one: bool = False) -> None:
        self.path, self._trust = Path(path), trust
        # A seed's run has no seeds of its own, even if its folder links to itself
        folders = {} if is_one else foreign.seed_folders(self.path)
        self._several = {seed: Run(one, trust, is_one=True) for seed, one in folders.items()}

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def seeds(self) -> dict[int, Run]:
        return self._several or {self.config.seed: self}

    @property
    def each(self) -> list[Run]:
        """The run of each seed, or this one; unlike ``seeds`` it reads no file."""
        return [*self._several.values()] or [self]

    def __fspath__(self) -> str:
        return str(self.path)

    @cached_property
    def result(self) -> dict[str, object]:
        """The content of ``result.json``; for several seeds of ``summary.json``."""
        name = foreign.SUMMARY if self._several else foreign.RESULT
        return _read_mapping(self.path / name, "the run is not complete, or damaged")

    @cached_property
    def config(self) -> RunConfig:
        """The run's settings; for several seeds those of the first."""
        file = self.each[0].path / foreign.CONFIG
        if not file.is_file():
            raise OutputError(f"{file}: there is no such file")
        return load_config(str(file), of_run=True, trust=replace(self._trust, reads=True))

    @cached_property
    def metrics(self) -> Rounds:
        """The figures of each round, by the keys of ``metrics.jsonl``."""
        reports = read_reports(self._one().path / foreign.METRICS)
        return Rounds(plain(one.to_record()) for one in reports)

    def predictions(self, client: int | None = None) -> Predictions:
        """Return the predictions for the nodes, a row for each node of each client.

        By default of all clients that are here. ``OutputError`` if there are none, of this client
        none, or a file is damaged.
        """
        return self._rows(Predictions, client)

    @property
    def kept_rounds(self) -> list[int]:
        """The round of predictions and models; several if clients kept different ones."""
        files = [one / SAID for one in self._places if (one / SAID).is_file()]
        with reading(self.path, OutputError):
            return sorted({int(_read_mapping(file).get("round", 0)) for file in files})

    def model(self, client: int | None = None) -> nn.Module:
        """Build a client's model, a plain PyTorch module, in evaluation mode.

        ``client`` is needed if models differ; None for a server's model. The module is called as
        ``model(x, edge_index)``, with features as the run treated them
        (``run.data.treatment.apply(x)``). ``OutputError`` as of ``predictions``.
        """
        return build_module(*self.saved(client))

    def embeddings(self, client: int | None = None) -> Embeddings:
        """Return the embeddings of nodes in their clients' spaces, if the method has embeddings.

        Parameters, rows and errors are those of ``predictions``.
        """
        return self._rows(Embeddings, client)

    def known_links(self, client: int | None = None) -> KnownLinks:
        """Return the links that the run knows, of all clients that are here or of one.

        With ``embeddings``, of a run with ``task: links``: the logit of a pair is the dot product
        of its two rows, or ``run.model(client).decoder(rows, pairs)`` with ``links.decoder: mlp``.
        ``OutputError`` as there.
        """
        return self._rows(KnownLinks, client)

    def predict(
        self,
        x: object,
        edge_index: object = None,
        *,
        client: int | None = None,
        edge_weight: object = None,
    ) -> Tensor:
        """Predict the classes of nodes that the run has not seen.

        Parameters
        ----------
        x : Tensor or ndarray
            ``[n, f]`` features as they were given to the run; they get the same treatment.
        edge_index : Tensor or ndarray, optional
            ``[2, e]`` edges, in one direction or both; None if they are not known.
        client : int, optional
            The client whose model predicts; needed if models differ.
        edge_weight : Tensor or ndarray, optional
            ``[e]``, if the run's edges have weights; by default 1.

        Returns
        -------
        Tensor
            ``[n, k]`` probabilities of the classes; with ``task: values`` the numbers, ``[n]``.

        Raises
        ------
        DataError, OutputError
            If the graph does not fit the run, or there is no model.
        """
        return self.predict_graph(new_graph(x, edge_index, self.data, edge_weight), client)

    def predict_graph(self, graph: NewGraph, client: int | None = None) -> Tensor:
        """Predict the nodes of a graph that ``read_new_graph`` read, as ``predict`` does."""
        return method_of(self.config).predict(self.config, self, graph, client)

    @cached_property
    def data(self) -> DataForm:
        """The form of new graphs: features, their treatment, classes."""
        path = self._one().path / foreign.DATA
        record = _read_mapping(path, "the form of new graphs is not known")
        with reading(path, OutputError, "damaged"):
            return DataForm.from_json(record)

    def _one(self) -> Run:
        if self._several:
            raise OutputError(f"{self.path}: runs of several seeds; name one of its folders seed-N")
        return self

    def _rows(self, kind: type[T], client: int | None) -> T:
        parts = [part for part in map(kind.read, self._places) if part is not None]
        if not parts:
            raise self._none(Path(kind.FILE).stem)
        joined: T = kind.join(parts)
        if client is None:
            return joined
        if client not in joined.client:
            raise self._not_of(client, joined.client.tolist())
        return joined.of_client(client)

    @cached_property
    def _places(self) -> list[Path]:
        """The folders with predictions or models: the server's and each SuperNode's."""
        clients = self._one().path / foreign.IN_RUN
        return [self.path, *sorted(one for one in clients.glob("*") if one.is_dir())]

    @cached_property
    def _models(self) -> list[SavedModels]:
        found = [one for folder in self._places for one in read_models(folder)]
        return [replace(one, trust=self._trust) for one in found]

    def all_saved(self) -> list[SavedModels]:
        """Return the models of all clients; ``OutputError`` if there are none."""
        if not self._models:
            raise self._none("models")
        return self._models

    def saved(self, client: int | None = None) -> tuple[SavedModels, int]:
        """Return the models with that of a client; without a client, the only model there is.

        If the server has a model, it is the run's.
        """
        forms, clients = self.all_saved(), self.clients
        if client is None and self.are_own:
            raise OutputError(
                f"{self.path}: each client has a model of its own; say which (client=, --client): "
                f"{brief(sorted(clients))}"
            )
        if client is None:
            client = NO_CLIENT if NO_CLIENT in clients else clients[0]
        for one in forms:
            if client in one.clients:
                return one, client
        raise self._not_of(client, clients)

    @property
    def clients(self) -> list[int]:
        return [number for one in self._models for number in one.clients]

    @property
    def are_own(self) -> bool:
        """Whether several clients here have models of their own, and the server has none."""
        is_one_model = all(
            not one.own and one.rows is None and one.is_like(self._models[0])
            for one in self._models
        )
        return len(self.clients) > 1 and NO_CLIENT not in self.clients and not is_one_model

    def _none(self, what: str) -> OutputError:
        why = "the run keeps none (save=), is not complete, or clients keep them where they live"
        if any((one / Embeddings.FILE).is_file() for one in self._places):
            why = "what it learnt are embeddings (`run.embeddings(client)`)"
        return OutputError(f"{self.path}: no {what}: {why}")

    def _not_of(self, client: int, clients: Iterable[int]) -> OutputError:
        known = brief(sorted({*clients} - {NO_CLIENT}))
        return OutputError(f"client {client}: {self.path} has those of clients {known}")


def load_run(path: Path | str, *, trust: bool | Trust = False) -> Run:
    """Read the outputs of a run; its files are read on demand.

    Parameters
    ----------
    path : Path or str
        The output folder of a run, or of several seeds; or a folder of a SuperNode's outputs, such
        as ``<data-folder>/outputs/<run>``.
    trust : bool
        Whether its files may name code that you do not have; each import is logged first.

    Raises
    ------
    OutputError
        If there is no such folder, or it is none of these.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise OutputError(f"{path}: no run; there is no such folder")
    run = Run(folder, trust if isinstance(trust, Trust) else Trust(code=trust))
    files = [folder / name for name in (foreign.CONFIG, *foreign.LEFT)]
    if not run._several and not any(one.is_file() for one in files):
        raise OutputError(f"{path}: no run; it has neither {foreign.CONFIG} nor {foreign.RESULT}")
    return run


def latest_in(data_folder: Path | str, *, trust: bool | Trust = False) -> Run:
    """Read the outputs of a SuperNode's last run, in ``<data-folder>/outputs``."""
    folder = Path(data_folder).expanduser()
    if not folder.is_dir():
        raise OutputError(f"data folder {data_folder}: there is no such folder")
    runs = [one for one in (folder / OUTPUTS).glob("*") if one.is_dir()]
    if not runs:
        raise OutputError(f"data folder {data_folder}: its clients keep no run (no {OUTPUTS}/)")
    return load_run(max(runs, key=lambda one: (one.stat().st_mtime_ns, one.name)), trust=trust)


def _read_mapping(path: Path, why: str = "damaged") -> Tree:
    with reading(path, OutputError, why):
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it is no mapping")
        return content
