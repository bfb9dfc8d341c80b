"""Which runs FedSCem's tables and figures need, and the figures that the paper prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flower_graph.apps.reproduce.experiments import Cell, Job, loaded

DATA = ("Cora", "CiteSeer", "PubMed", "LastFM-Asia")
SEEDS = (0, 1, 2)
SELF, GLOBAL, FEDSCEM, MASKED = "Self-training", "Global", "FedSCem", "FedSCem, masked"
# Accuracies do not depend on the masks but for the fixed-point resolution, so that the rows of a
# table do without; the row "masked" is the whole method, for its seconds.
PLAIN = ("strategy.alignment=plain", "strategy.aggregation=plain")
_OURS = ("strategy.name=masked-embedding-averaging", *PLAIN)
METHODS = {
    SELF: ("strategy.name=self-training",),
    "FedAvg": ("strategy.name=fedavg",),
    "FedProx": ("strategy.name=fedprox",),
    "LocalSage+": ("strategy.name=local-sage",),
    "FedSage+": ("strategy.name=fed-sage",),
    "FedSCem_iter": (*_OURS, "strategy.variant=iter"),
    "FedSCem-": (*_OURS, "strategy.variant=minus"),
    FEDSCEM: (*_OURS, "strategy.variant=full"),
    "FedAvg+FedSCem": (*_OURS, "strategy.variant=full", "strategy.model_sharing=fedavg"),
    "FedProx+FedSCem": (*_OURS, "strategy.variant=full", "strategy.model_sharing=fedprox"),
}
# Rows that the paper does not have: its settings where ours differ, and FedAvg given time.
PAPERS_OWN, LONG_FEDAVG = "FedSCem, paper's mu, tau, head", "FedAvg, 4 × rounds"
PAPERS_SETTINGS = {
    "Cora": ("strategy.mu=5", "strategy.tau=10"),
    "CiteSeer": ("strategy.mu=1", "strategy.tau=0.1"),
    "PubMed": ("strategy.mu=10", "strategy.tau=1"),
    "LastFM-Asia": ("strategy.mu=1", "strategy.tau=0.1"),
}
METHODS |= {PAPERS_OWN: (*_OURS, "model.projection=32"), LONG_FEDAVG: METHODS["FedAvg"]}
ROUND_FACTOR = {LONG_FEDAVG: 4}
LONG_DATA = ("Cora",)  # where FedAvg is given time
GRID_NAME = f"{FEDSCEM}, mu="
GRID_SHARE = 3  # the grid's runs have one third of the rounds
WHOLE_METHOD = (
    "strategy.name=masked-embedding-averaging",
    "strategy.variant=full",
    "strategy.alignment=psi",
    "strategy.aggregation=masked",
)
PER_CLIENT, STRICT = "per-client", "global"  # values of partition.split
STRICT_METHODS = (SELF, "FedAvg", FEDSCEM)
# Table 1 is on these two data sets; its Global can be judged under the strict split only.
TABLE_1_DATA, TABLE_1_METHODS = ("Cora", "LastFM-Asia"), (SELF, "FedAvg", "FedProx")
ABLATION = (  # Figure 5
    {"a": (SELF, FEDSCEM, "FedAvg", "FedAvg+FedSCem", "FedProx", "FedProx+FedSCem")}
    | {"b": ("FedSCem_iter", "FedSCem-", FEDSCEM)}
)
CONVERGENCE = {  # Figure 6b, in two pictures: six curves can be told apart, ten cannot
    "": (SELF, "FedAvg", "FedProx", "FedSCem_iter", "FedSCem-", FEDSCEM),
    "-more": (SELF, "LocalSage+", "FedSage+", "FedAvg+FedSCem", "FedProx+FedSCem", FEDSCEM),
}
MU, TAU = (0.5, 1, 5, 10), (0.01, 0.1, 1, 5, 10)
TABLES = ("table-1", "table-3", "strict", "figure-5", "figure-6a", "figure-6b", "figure-8")

# Table 3 by data set, in the order of METHODS, whose last two it lacks: accuracy, its deviation,
# seconds a round, and GPU memory in percent. None where the paper has none.
_ROWS = tuple[tuple[float, float, float | None, float | None], ...]
PAPER: dict[str, _ROWS] = {
    "Cora": (
        (0.8006, 0.0028, 1.260, 2.95),
        (0.7982, 0.0012, 1.605, 3.50),
        (0.7991, 0.0013, 1.665, 3.50),
        (0.7234, 0.1531, 0.601, 94.54),
        (0.6752, 0.0670, None, None),
        (0.8182, 0.0006, 3.867, 13.21),
        (0.8294, 0.0014, 2.799, 13.23),
        (0.8288, 0.0021, 3.795, 13.21),
        (0.8044, 0.0030, 3.825, 13.24),
        (0.8058, 0.0026, 3.909, 13.24),
    ),
    "CiteSeer": (
        (0.7913, 0.0060, 1.251, 3.02),
        (0.8142, 0.0075, 1.596, 4.42),
        (0.8161, 0.0069, 1.629, 4.42),
        (0.8260, 0.0056, 2.183, 94.54),
        (0.7128, 0.0155, None, None),
        (0.8389, 0.0023, 3.666, 6.63),
        (0.8382, 0.0005, 2.649, 6.58),
        (0.8402, 0.0018, 3.696, 6.63),
        (0.8189, 0.0051, 3.645, 6.77),
        (0.8220, 0.0047, 3.765, 6.77),
    ),
    "PubMed": (
        (0.8207, 0.0037, 1.245, 2.97),
        (0.8178, 0.0026, 1.575, 3.16),
        (0.8172, 0.0032, 1.611, 3.16),
        (0.8189, 0.0041, 0.601, 94.54),
        (0.8008, 0.0219, None, None),
        (0.8356, 0.0012, 6.186, 97.36),
        (0.8338, 0.0019, 5.115, 97.36),
        (0.8509, 0.0010, 6.069, 97.36),
        (0.8222, 0.0028, 6.054, 97.36),
        (0.8216, 0.0035, 6.261, 97.36),
    ),
    "LastFM-Asia": (
        (0.8678, 0.0013, 1.236, 3.53),
        (0.8582, 0.0006, 1.581, 6.45),
        (0.8594, 0.0027, 1.641, 6.45),
        (0.8559, 0.0055, 5.990, 95.06),
        (0.6822, 0.0330, None, None),
        (0.8704, 0.0014, 3.909, 16.98),
        (0.8735, 0.0003, 2.991, 15.74),
        (0.8754, 0.0012, 3.960, 16.98),
        (0.8653, 0.0013, 3.930, 16.98),
        (0.8651, 0.0031, 4.020, 16.98),
    ),
}
PAPER_GLOBAL = {"Cora": (0.8399, 0.0081), "LastFM-Asia": (0.8792, 0.0038)}  # Table 1

# Seconds of a round on one core, and of what goes before the first one, both about: for the
# estimate that is printed first. LocalSage+ and FedSage+ train their generators before.
ROUND_SECONDS = {"Cora": 0.07, "CiteSeer": 0.08, "PubMed": 0.13, "LastFM-Asia": 0.13}
START_SECONDS, SAGE_SECONDS = 6.0, 20.0


def paper_of(data: str, method: str) -> tuple[float | None, ...]:
    """Return the paper's accuracy, its deviation, seconds a round and memory in percent."""
    if method == GLOBAL:
        return *PAPER_GLOBAL.get(data, (None, None)), None, None
    name = FEDSCEM if method in (MASKED, PAPERS_OWN) else method
    if name == LONG_FEDAVG:
        return None, None, None, None
    return PAPER[data][list(METHODS).index(name)]


@dataclass(frozen=True)
class Plan:
    """What of the comparison is asked for."""

    data: tuple[str, ...]  # Data sets, methods and tables, each in the order of this module
    methods: tuple[str, ...]
    tables: tuple[str, ...]
    seeds: tuple[int, ...] | None = None  # The seeds that the user gave
    rounds: int | None = None  # Rounds of every run; without them each config's own
    overrides: tuple[str, ...] = ()  # Settings laid over those of every run
    grid_data: tuple[str, ...] = field(default=("Cora",))  # Data sets of Figure 6a

    @property
    def table_seeds(self) -> tuple[int, ...]:
        """Seeds of everything but the grid and the masked row."""
        return self.seeds or SEEDS

    @property
    def grid_seeds(self) -> tuple[int, ...]:
        """Seeds of the grid: one, unless the user named some."""
        return self.seeds or SEEDS[:1]

    def chosen(self, methods: Sequence[str]) -> list[str]:
        """Return those of some methods that are asked for."""
        return [method for method in methods if method in self.methods]

    def cell(self, data: str, method: str, split: str = PER_CLIENT) -> Cell:
        """Return the runs of one row."""
        extra = WHOLE_METHOD if method == MASKED else METHODS.get(method, ())
        extra = (*extra, *PAPERS_SETTINGS[data]) if method == PAPERS_OWN else extra
        overrides = (*extra, f"partition.split={split}", *self.overrides)
        return Cell(data, "GCN", method, _config(data), overrides, method == GLOBAL)

    def grid_cell(self, data: str, mu: float, tau: float) -> Cell:
        """Return the runs of one field of the grid."""
        plain = self.cell(data, FEDSCEM)
        name = f"{GRID_NAME}{mu:g}, tau={tau:g}"
        settings = (*plain.overrides, f"strategy.mu={mu:g}", f"strategy.tau={tau:g}")
        return Cell(data, "GCN", name, plain.config, settings)

    def rounds_of(self, data: str, method: str = FEDSCEM) -> int:
        """Return the rounds of a method's runs."""
        rounds = self.rounds or loaded(_config(data), self.overrides).rounds
        if method.startswith(GRID_NAME):
            return max(1, rounds // GRID_SHARE)
        return rounds * ROUND_FACTOR.get(method, 1)

    def jobs(self) -> list[Job]:
        """List every run that the tables need, each once."""
        wanted = [job for data in self.data for job in self._jobs_of(data)]
        return list(dict.fromkeys(wanted))

    def _jobs_of(self, data: str) -> list[Job]:
        # Pairs of cells and seeds; a run that two tables need may be there twice.
        result = [(self.cell(data, m), self.table_seeds) for m in self._per_client(data)]
        if "table-3" in self.tables and FEDSCEM in self.methods:
            result.append((self.cell(data, MASKED), self.table_seeds[:1]))
        result += [(self.cell(data, m, STRICT), self.table_seeds) for m in self._strict(data)]
        if "figure-6a" in self.tables and FEDSCEM in self.methods and data in self.grid_data:
            fields = [self.grid_cell(data, mu, tau) for mu in MU for tau in TAU]
            result += [(cell, self.grid_seeds) for cell in fields]
        return [
            Job(cell, seed, self.rounds_of(data, cell.method))
            for cell, seeds in result
            for seed in seeds
        ]

    def _per_client(self, data: str) -> list[str]:
        if {"table-3", "figure-6b"} & {*self.tables}:
            rows = self.chosen([*METHODS])
            return rows if data in LONG_DATA else [m for m in rows if m != LONG_FEDAVG]
        wanted = [m for ms in ABLATION.values() for m in ms] if "figure-5" in self.tables else []
        if "table-1" in self.tables and data in TABLE_1_DATA:
            wanted += TABLE_1_METHODS
        return self.chosen(list(dict.fromkeys(wanted)))

    def _strict(self, data: str) -> list[str]:
        wanted = [*STRICT_METHODS] if "strict" in self.tables else []
        if "table-1" in self.tables and data in TABLE_1_DATA:
            wanted += [*TABLE_1_METHODS, GLOBAL]
        return self.chosen(list(dict.fromkeys(wanted)))


def estimate(jobs: Sequence[Job]) -> float:
    """Return about how many seconds of one core these runs take."""
    total = 0.0
    for job in jobs:
        is_sage = any("-sage" in setting for setting in job.cell.overrides)
        total += START_SECONDS + (SAGE_SECONDS if is_sage else 0)
        # The generated neighbours make a round of these two about twice as long.
        total += job.rounds * ROUND_SECONDS[job.cell.data] * (2 if is_sage else 1)
    return total


def _config(data: str) -> str:
    return f"fedscem/{data.lower()}"
