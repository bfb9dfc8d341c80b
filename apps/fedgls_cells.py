"""Which runs FedGLS's tables and figures need, and the figures that the paper prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flower_graph.apps.cells import Cell, Job, loaded
from flower_graph.config import FedGLSConfig

DATA = ("Cora", "CiteSeer", "PubMed", "Flickr", "ogbn-arxiv")
SEEDS = (0, 1, 2, 3, 4)
MLP, KNN, FEDGLS = "Fed-MLP", "Fed-GNN_k", "FedGLS"
# Not in the paper: FedGLS whose learners stay as they began, neighbours weighted by similarity.
FIXED, FIXED_SETTINGS = "FedGLS, phi fixed", ("graph.learning_rate=0",)
METHODS = {
    MLP: "fed-mlp",
    "Fed-GNNMLP": "fed-gnn-mlp",
    "FedProto": "fedproto",
    "Local-GNN_k": "local-gnn-knn",
    KNN: "fed-gnn-knn",
    FEDGLS: "structure-fedavg",
    "Fed-GNN": "fed-gnn",
    FIXED: "structure-fedavg",
}
COMPARED = (MLP, KNN, FEDGLS)  # methods of Tables 2 and 3
RIVALS = (KNN, MLP, FIXED)  # what FedGLS is compared with seed by seed
CURVES = (KNN, FEDGLS)  # methods of Figure 3
# Settings that one method has and its data set's config does not, by data set and method: chosen by
# validation accuracy, never by test accuracy. They hold in every table, and the page names them.
TUNED: dict[tuple[str, str], tuple[str, ...]] = {
    ("Cora", "Local-GNN_k"): ("graph.neighbours=5",),
    ("Cora", KNN): ("graph.neighbours=5",),
}

TABLES = ("table-1", "table-2", "table-3", "figure-3")
FIGURE_3_DATA = ("Cora", "Flickr")  # other data sets are drawn too where Table 1 ran them

# The means that the paper prints, without deviations: Table 1 in the order of METHODS, Table 2 by
# local epochs and Table 3 by clients with and without edges, both in the order of COMPARED.
PAPER = {
    "Cora": (0.6141, 0.7448, 0.8089, 0.8002, 0.7891, 0.8180, 0.8238),
    "CiteSeer": (0.7253, 0.7521, 0.7876, 0.7834, 0.7884, 0.8058, 0.7951),
    "PubMed": (0.8398, 0.8413, 0.8341, 0.8328, 0.8426, 0.8491, 0.8629),
    "Flickr": (0.4649, 0.4868, 0.4720, 0.4844, 0.4796, 0.4937, 0.5014),
    "ogbn-arxiv": (0.4495, 0.4652, 0.4685, 0.4573, 0.4761, 0.4872, 0.5386),
}
PAPER_EPOCHS = {
    "CiteSeer": {
        3: (0.7203, 0.7876, 0.8017),
        5: (0.7253, 0.7884, 0.8058),
        10: (0.7311, 0.7859, 0.8015),
    },
    "PubMed": {
        3: (0.8406, 0.8467, 0.8477),
        5: (0.8398, 0.8426, 0.8491),
        10: (0.8354, 0.8455, 0.8493),
    },
}
PAPER_RATIOS = {
    "PubMed": {
        "12:4": (0.8398, 0.8465, 0.8527),
        "8:8": (0.8398, 0.8426, 0.8491),
        "4:12": (0.8398, 0.8351, 0.8422),
    },
    "Flickr": {
        "12:8": (0.4649, 0.4831, 0.4982),
        "10:10": (0.4649, 0.4796, 0.4937),
        "8:12": (0.4649, 0.4687, 0.4790),
    },
}

# Seconds of a local epoch of all clients on one core, about, for the estimate that is printed
# first; FedGLS trains two networks and a graph learner. Flickr and ogbn-arxiv are guessed.
EPOCH_SECONDS = {
    "Cora": 0.007,
    "CiteSeer": 0.008,
    "PubMed": 0.03,
    "Flickr": 0.3,
    "ogbn-arxiv": 0.6,
}
START_SECONDS, FEDGLS_FACTOR = 1.5, 3


@dataclass(frozen=True)
class Entry:
    """One figure of one table: a method on a data set, under one value of what the table varies.

    Attributes
    ----------
    table, data, method : str
        Where it stands.
    varied : str
        What the table varies, such as ``12:4``; empty in Table 1.
    cell : Cell
        The runs, which several entries may share.
    paper : float, optional
        The paper's mean accuracy.
    """

    table: str
    data: str
    method: str
    varied: str
    cell: Cell
    paper: float | None

    @property
    def place(self) -> tuple[str, str, str]:
        """Where the entry stands, whatever its method: there methods are compared."""
        return self.table, self.data, self.varied


@dataclass(frozen=True)
class Plan:
    """What of the comparison is asked for.

    Attributes
    ----------
    data, methods, tables : tuple of str
        Data sets, methods and tables, each in the order of this module.
    seeds : tuple of int
        Seeds of every entry.
    rounds : int, optional
        Rounds of every run; without them each config's own.
    overrides : tuple of str
        Settings laid over those of every run.
    """

    data: tuple[str, ...]
    methods: tuple[str, ...]
    tables: tuple[str, ...]
    seeds: tuple[int, ...] = SEEDS
    rounds: int | None = None
    overrides: tuple[str, ...] = ()

    def common(self, data: str) -> FedGLSConfig:
        """Return the settings of a data set, before what one method has for itself."""
        return _loaded(_config(data), self.overrides)

    def settings(self, data: str, method: str) -> FedGLSConfig:
        """Return the settings of a method on a data set."""
        cell = self.cell(data, method)
        return _loaded(cell.config, cell.overrides)

    def rounds_of(self, data: str) -> int:
        """Return the rounds of a data set's runs."""
        return self.rounds or self.common(data).rounds

    def cell(self, data: str, method: str) -> Cell:
        """Return the runs of a row of Table 1."""
        name = f"strategy.name={METHODS[method]}"
        extra = FIXED_SETTINGS if method == FIXED else TUNED.get((data, method), ())
        overrides = (name, *extra, *self.overrides)
        model = "MLP" if method == MLP else "GCN"
        return Cell(data, model, method, _config(data), overrides)

    def epochs_cell(self, data: str, method: str, epochs: int) -> Cell:
        """Return the runs with so many local epochs; Table 1's, where they are the config's."""
        usual = self.settings(data, method).strategy.local_epochs
        cell = self.cell(data, method)
        return cell if usual == epochs else _varied(cell, f"strategy.local_epochs={epochs}")

    def ratio_cell(self, data: str, method: str, share: float) -> Cell:
        """Return the runs with such a share of graphless clients; Table 1's, where it is that."""
        usual = self.settings(data, method).graph.graphless_ratio
        cell = self.cell(data, method)
        # Fed-MLP reads no edges: it is the same run with any share.
        if method == MLP or usual == share:
            return cell
        return _varied(cell, f"graph.graphless_ratio={share:g}")

    def entries(self) -> list[Entry]:
        """List all entries, tables in the order in which they are run."""
        made: dict[str, Callable[[str], Iterator[Entry]]] = {
            "table-1": self._table_1,
            "figure-3": self._figure_3,
            "table-3": self._table_3,
            "table-2": self._table_2,
        }
        asked = [make for name, make in made.items() if name in self.tables]
        found = (entry for make in asked for data in self.data for entry in make(data))
        return [entry for entry in found if entry.method in self.methods]

    def stages(self) -> list[list[Job]]:
        """List the runs, each once, by table and seed: what is stopped early has whole seeds."""
        entries, known, stages = self.entries(), set[Job](), []
        for table in dict.fromkeys(entry.table for entry in entries):
            for seed in self.seeds:
                jobs = dict.fromkeys(
                    Job(e.cell, seed, self.rounds_of(e.data)) for e in entries if e.table == table
                )
                stages.append([job for job in jobs if job not in known])
                known.update(jobs)
        return [stage for stage in stages if stage]

    def jobs(self) -> list[Job]:
        """List every run that the tables need, each once, in the order of the stages."""
        return [job for stage in self.stages() for job in stage]

    def _table_1(self, data: str) -> Iterator[Entry]:
        papers = dict(zip(METHODS, PAPER[data], strict=False))  # it has no row FIXED
        for method in METHODS:
            cell = self.cell(data, method)
            yield Entry("Table 1", data, method, "", cell, papers.get(method))

    def _figure_3(self, data: str) -> Iterator[Entry]:
        for method in CURVES if data in FIGURE_3_DATA else ():
            yield Entry("Figure 3", data, method, "", self.cell(data, method), None)

    def _table_2(self, data: str) -> Iterator[Entry]:
        for epochs, figures in PAPER_EPOCHS.get(data, {}).items():
            for method, paper in zip(COMPARED, figures, strict=True):
                cell = self.epochs_cell(data, method, epochs)
                yield Entry("Table 2", data, method, str(epochs), cell, paper)

    def _table_3(self, data: str) -> Iterator[Entry]:
        for ratio, figures in PAPER_RATIOS.get(data, {}).items():
            for method, paper in zip(COMPARED, figures, strict=True):
                having, lacking = map(int, ratio.split(":"))
                cell = self.ratio_cell(data, method, lacking / (having + lacking))
                yield Entry("Table 3", data, method, ratio, cell, paper)


def estimate(jobs: Sequence[Job]) -> float:
    """Return about how many seconds of one core these runs take."""
    total = 0.0
    for job in jobs:
        config = _loaded(job.cell.config, job.cell.overrides)
        factor = FEDGLS_FACTOR if config.strategy.name == METHODS[FEDGLS] else 1
        epoch = EPOCH_SECONDS[job.cell.data] * factor
        total += START_SECONDS + job.rounds * config.strategy.local_epochs * epoch
    return total


def _config(data: str) -> str:
    return f"fedgls/{data.lower()}"


def _loaded(config: str, overrides: tuple[str, ...]) -> FedGLSConfig:
    found = loaded(config, overrides)
    assert isinstance(found, FedGLSConfig)
    return found


def _varied(cell: Cell, setting: str) -> Cell:
    """Lay one setting over a cell's, and say so in its name."""
    name = f"{cell.method}, {setting.partition('.')[2]}"
    return Cell(cell.data, cell.model, name, cell.config, (*cell.overrides, setting))
