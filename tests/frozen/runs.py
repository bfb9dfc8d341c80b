"""The runs whose behaviour is frozen, as words of the command line.

Not reachable from the command line, and so not here: strategies that users compose of Flower's
classes (``ReportedFedAvg`` with ``FedAdam``, Flower's wrappers, Flower's own round loop) and
clients that come, go or lie. Data folders of single parties are, too, only used by deployments.
Each of these has tests of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One call of a command.

    ``supernodes`` is 0 for commands that take none. With ``again`` the run is done, then its last
    checkpoint and its result are removed, and the command's ``--resume`` goes on from the rest.
    """

    name: str
    command: str
    config: str
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    supernodes: int = 0
    again: bool = False

    def words(self) -> list[str]:
        """Give the command's words, all but the output folder."""
        nodes = ["--supernodes", str(self.supernodes)] if self.supernodes else []
        return [self.command, self.config, *self.settings, *nodes, *self.options]


SMALL = (
    "data.name=csbm",
    "data.nodes=90",
    "data.classes=3",
    "data.degree=5",
    "data.num_features=24",
    "data.active=6",
    "device=cpu",
)
SPLIT = ("data.split=random", "data.train_per_class=8", "data.num_val=20", "data.num_test=30")
BUDGET = ("privacy.epsilon=100", "privacy.clipping_norm=0.5")
SHOWN = (*BUDGET, "privacy.measurements=report")
ROBUST = (
    ("krum", "strategy.robust=krum strategy.num_malicious=1"),
    ("trimmed-mean", "strategy.robust=trimmed-mean strategy.beta=0.25"),
    ("median", "strategy.robust=median"),
)

NFEDGNN = (*SMALL, *SPLIT, "rounds=3", "model.hidden=4")
FEDSCEM = (
    *SMALL,
    "rounds=3",
    "partition.clients=6",
    "partition.min_nodes=5",
    "partition.hops=1",
    "model.hidden=6",
    "model.projection=4",
    "strategy.learning_rate=0.01",
)
FEDGLS = (
    *SMALL,
    "rounds=3",
    "partition.clients=4",
    "graph.neighbours=4",
    "model.hidden=6",
    "strategy.local_epochs=2",
)
PPFL = (
    *SMALL,
    "data.nodes=120",
    "partition.ratios=[0.3,0.3,0.4]",
    "rounds=2",
    "partition.clients=3",
    "model.dimension=6",
    "deepwalk.walks=2",
    "deepwalk.length=8",
    "gat.epochs=3",
    "judge.folds=2",
    "judge.every=2",
    "judge.mlp=false",
)
PERSONAL = (
    *SMALL,
    "partition.ratios=[0.3,0.3,0.4]",
    "rounds=3",
    "partition.clients=4",
    "model.hidden=6",
)
COMPARED = ("fedavg", "fedprox", "local", "ditto", "fedproto")
# Name of a method, its config, settings under which it is small, and SuperNodes
METHODS = {
    "nfedgnn": ("nfedgnn/cora", NFEDGNN, 3),
    "fedscem": ("fedscem/cora-linqs", FEDSCEM, 4),
    "fedgls": ("fedgls/cora-linqs", FEDGLS, 4),
    "deepwalk": ("ppfl/cora-linqs-deepwalk", PPFL, 3),
    "gat": ("ppfl/cora-linqs-gat", PPFL, 3),
    "fedgta": ("fedgta/cora-linqs", PERSONAL, 4),
    "fedpub": ("fedpub/cora-linqs", (*PERSONAL, "strategy.block_nodes=20"), 4),
    **{name: (f"{name}/cora-linqs", PERSONAL, 4) for name in COMPARED},
}
# Runs in which a choice hangs on the last bit of a sum, which other machines round otherwise. The
# generated features are zeros and ones, so that many nodes are equally near to each other: rounding
# says which of them a learnt graph or one of nearest neighbours joins. Krum takes one of clients
# that are about equally near, and an attack's precision depends on an order.
DECIDED_BY_ROUNDING = re.compile(
    r"^(ray/)?fedgls(?!/(fed-gnn$|fed-gnn-(central|participation|resumed)|none-graphless"
    r"|fed-mlp|fed-gnn-mlp|fedproto|partition|show))|krum|/audit$"
)
ATTACKED = ("nfedgnn", "fedscem", "fedgls", "deepwalk", "gat")


def _run(
    method: str, variant: str, *settings: str, supernodes: int | None = None, again: bool = False
) -> Run:
    """Make a variant of a method; one setting may hold several words."""
    config, small, nodes = METHODS[method]
    words = tuple(word for setting in settings for word in setting.split())
    count = nodes if supernodes is None else supernodes
    return Run(f"{method}/{variant}", "run", config, (*small, *words), (), count, again)


def _nfedgnn() -> list[Run]:
    """Split gradient relay: models, smoothness, averaging, participation, noise."""
    gat, sage = "model.name=gat model.heads=2", "model.name=sage"
    averaged = "strategy.share=averaged strategy.average_every=2 strategy.average_over=holders"
    over_all = "strategy.share=averaged strategy.average_over=all strategy.average_every="
    cnfgnn = f"{over_all}1 strategy.reg_weight=0"
    summed = "strategy.share=summed strategy.reg_weight=null"
    bundled = Run("nfedgnn/bundled", "run", "nfedgnn/cora-linqs", ("rounds=2", "device=cpu"), (), 2)
    seeds = Run(
        "nfedgnn/seeds", "run", "nfedgnn/cora", (*NFEDGNN, "rounds=2"), ("--seeds", "1,2"), 1
    )
    return [
        bundled,
        seeds,
        _run("nfedgnn", "gcn"),
        _run("nfedgnn", "one-supernode", supernodes=1),
        _run("nfedgnn", "gat", gat),
        _run("nfedgnn", "sage", sage),
        _run("nfedgnn", "no-smoothness", "strategy.reg_weight=0"),
        _run("nfedgnn", "no-user-bias", "model.user_bias=false"),
        _run("nfedgnn", "averaged", averaged),
        _run("nfedgnn", "averaged-gat", averaged, gat),
        _run("nfedgnn", "cnfgnn", cnfgnn),
        _run("nfedgnn", "averaged-over-all-sage", f"{over_all}2", sage),
        _run("nfedgnn", "summed", summed),
        _run("nfedgnn", "summed-gat", summed, gat),
        _run("nfedgnn", "summed-sage-sketch", summed, sage, "strategy.sketch=8"),
        _run("nfedgnn", "resumed-summed", "checkpoint_every=1", summed,
             "strategy.participation=0.5", again=True),
        _run("nfedgnn", "participation", "strategy.participation=0.5"),
        _run("nfedgnn", "participation-averaged", "strategy.participation=0.5", averaged),
        _run("nfedgnn", "ratios", "data.ratios=[0.5,0.2,0.3]", "data.features=as-is"),
        _run("nfedgnn", "noise", *BUDGET),
        _run("nfedgnn", "noise-gat", *BUDGET, gat),
        _run("nfedgnn", "noise-shown", *SHOWN),
        _run("nfedgnn", "noise-participation", *BUDGET, "strategy.participation=0.5"),
        _run("nfedgnn", "resumed", "checkpoint_every=1", again=True),
        _run("nfedgnn", "resumed-averaged", "checkpoint_every=1", averaged, again=True),
        _run("nfedgnn", "resumed-participation", "checkpoint_every=1",
             "strategy.participation=0.5", again=True),
        _run("nfedgnn", "resumed-schedule", "checkpoint_every=1 rounds=5",
             "strategy.schedule=warmup-cosine", "strategy.participation=0.5", again=True),
    ]  # fmt: skip


def _fedscem() -> list[Run]:
    """FedSCem: variants, alignments, sums, shared models, participation, noise."""
    plain = "strategy.aggregation=plain strategy.alignment=plain"
    half = "strategy.participation=0.5"
    shared = "strategy.resolution=1e-6 strategy.model_sharing"
    bundled = Run(
        "fedscem/bundled", "run", "fedscem/cora-linqs",
        ("rounds=2", "device=cpu", "partition.clients=6", *plain.split()), (), 2,
    )  # fmt: skip
    runs = [
        bundled,
        _run("fedscem", "full"),
        _run("fedscem", "one-supernode", supernodes=1),
        _run("fedscem", "iter", "strategy.variant=iter"),
        _run("fedscem", "minus", "strategy.variant=minus"),
        _run("fedscem", "unmasked", "strategy.aggregation=plain"),
        _run("fedscem", "plain", plain),
        _run("fedscem", "plain-alignment", "strategy.alignment=plain"),
        _run("fedscem", "two-epochs", "strategy.local_epochs=2", plain),
        _run("fedscem", "global-split", "partition.split=global", plain),
        _run("fedscem", "two-hops", "partition.hops=2", plain),
        _run("fedscem", "participation", half),
        _run("fedscem", "participation-plain", half, plain),
        _run("fedscem", "noise", *BUDGET, "strategy.limit=4096"),
        _run("fedscem", "noise-shown", *SHOWN, "strategy.limit=4096"),
        _run("fedscem", "noise-plain", *SHOWN, plain),
        _run("fedscem", "resumed", "checkpoint_every=1", again=True),
        _run("fedscem", "resumed-plain", "checkpoint_every=1", plain, again=True),
        _run("fedscem", "resumed-participation", "checkpoint_every=1", half, again=True),
    ]  # fmt: skip
    for sharing in ("fedavg", "fedprox"):
        runs.append(_run("fedscem", f"{sharing}+fedscem", f"{shared}={sharing}"))
        runs.append(_run("fedscem", f"{sharing}+plain", f"{shared}={sharing}", plain))
        runs.append(_run("fedscem", f"{sharing}+minus", f"{shared}={sharing}",
                         "strategy.variant=minus"))  # fmt: skip
    return runs


def _ego_baselines() -> list[Run]:
    """What FedSCem is compared with, on the same ego-networks."""
    half, each = "strategy.participation=0.5", 6
    runs = []
    for name in ("self-training", "fedavg", "fedprox", "local-sage", "fed-sage"):
        setting = f"strategy.name={name}" + " rounds=2" * ("sage" in name)
        runs += [
            _run("fedscem", name, setting),
            _run("fedscem", f"{name}-participation", setting, half),
            _run("fedscem", f"{name}-resumed", setting, "checkpoint_every=1", again=True),
        ]
    for name in ("fedavg", "fedprox"):
        setting = f"strategy.name={name}"
        runs += [
            _run("fedscem", f"{name}-noise", setting, *BUDGET, supernodes=each),
            _run("fedscem", f"{name}-central", setting, *BUDGET, "privacy.form=central",
                 supernodes=each),
            _run("fedscem", f"{name}-central-shown", setting, *SHOWN, "privacy.form=central",
                 supernodes=each),
        ]  # fmt: skip
        runs += [
            _run("fedscem", f"{name}-{robust}", setting, words, supernodes=each)
            for robust, words in ROBUST
        ]
    return runs


def _fedgls() -> list[Run]:
    """FedGLS: encoders, similarities, partitions, optimisers, averages, noise; baselines."""
    half, central = "strategy.participation=0.5", "privacy.form=central"
    runs = [
        Run("fedgls/bundled", "run", "fedgls/cora-linqs", ("rounds=2", "device=cpu"), (), 2),
        _run("fedgls", "attentive-cosine"),
        _run("fedgls", "one-supernode", supernodes=1),
        _run("fedgls", "attentive-euclidean", "graph.similarity=euclidean"),
        _run("fedgls", "attentive-inner", "graph.similarity=inner"),
        _run("fedgls", "mlp-cosine", "graph.encoder=mlp graph.width=5"),
        _run("fedgls", "mlp-euclidean", "graph.encoder=mlp graph.similarity=euclidean"),
        _run("fedgls", "mlp-inner", "graph.encoder=mlp graph.similarity=inner graph.layers=1"),
        _run("fedgls", "all-graphless", "graph.graphless_ratio=1"),
        _run("fedgls", "none-graphless", "strategy.name=fed-gnn graph.graphless_ratio=0"),
        _run("fedgls", "optimiser-reset", "strategy.optimiser=reset"),
        _run("fedgls", "metis", "partition.method=metis"),
        _run("fedgls", "dirichlet", "partition.method=dirichlet"),
        _run("fedgls", "random", "partition.method=random"),
        _run("fedgls", "participation", half),
        _run("fedgls", "noise", *BUDGET),
        _run("fedgls", "noise-shown", *SHOWN),
        _run("fedgls", "central", *BUDGET, central),
        _run("fedgls", "central-shown", *SHOWN, central),
        _run("fedgls", "resumed", "checkpoint_every=1", again=True),
        _run("fedgls", "resumed-reset", "checkpoint_every=1 strategy.optimiser=reset", again=True),
        _run("fedgls", "resumed-participation", "checkpoint_every=1", half, again=True),
    ]
    runs += [_run("fedgls", robust, words) for robust, words in ROBUST]
    baselines = ("fed-mlp", "fed-gnn-mlp", "fedproto", "local-gnn-knn", "fed-gnn-knn", "fed-gnn")
    for name in baselines:
        setting = f"strategy.name={name}"
        runs += [
            _run("fedgls", name, setting),
            _run("fedgls", f"{name}-participation", setting, half),
            _run("fedgls", f"{name}-resumed", setting, "checkpoint_every=1", again=True),
        ]
    runs += [
        _run("fedgls", "fed-gnn-central", "strategy.name=fed-gnn", *SHOWN, central),
        _run("fedgls", "fed-mlp-noise", "strategy.name=fed-mlp", *SHOWN),
        _run("fedgls", "fed-gnn-knn-median", "strategy.name=fed-gnn-knn strategy.robust=median"),
        _run("fedgls", "fedproto-weight", "strategy.name=fedproto strategy.prototype_weight=3"),
    ]
    return runs


def _ppfl() -> list[Run]:
    """PPFL-GNN with both models: alignments, absent clients, public nodes, noise; alone."""
    half = "strategy.participation=0.67"
    runs = []
    for model in ("deepwalk", "gat"):
        runs += [
            _run(model, "pairs"),
            _run(model, "one-supernode", supernodes=1),
            _run(model, "consensus", "strategy.alignment=consensus"),
            _run(model, "secure", "strategy.alignment=secure"),
            _run(model, "local", "strategy.name=local"),
            _run(model, "rotations-only", "strategy.rotations_only=true"),
            _run(model, "participation", half),
            _run(model, "last", half, "strategy.absent=last rounds=3"),
            _run(model, "participation-consensus", half, "strategy.alignment=consensus"),
            _run(model, "noise", *BUDGET),
            _run(model, "noise-consensus", *SHOWN, "strategy.alignment=consensus"),
            _run(model, "resumed", "checkpoint_every=1 rounds=3", again=True),
            _run(model, "resumed-last", half, "strategy.absent=last",
                 "checkpoint_every=1 rounds=3", again=True),
            _run(model, "resumed-secure", "checkpoint_every=1 strategy.alignment=secure",
                 again=True),
            _run(model, "resumed-local", "checkpoint_every=1 strategy.name=local", again=True),
        ]  # fmt: skip
    return [
        *runs,
        _run("deepwalk", "judged-by-mlp", "judge.mlp=true judge.every=1"),
        _run("deepwalk", "degree", "partition.public=degree"),
        _run("deepwalk", "cover", "partition.public=cover"),
        _run("gat", "label-noise", "partition.label_noise=0.3"),
        _run("gat", "heads", "gat.heads=2 gat.beta=0"),
    ]


def _personal() -> list[Run]:
    """FedGTA and FED-PUB: what is compared, masks, overlapping clients, participation."""
    half = "strategy.participation=0.5"
    overlap = "partition.method=metis-overlapping partition.draws=2"
    runs = [
        _run("fedgta", "raw", "strategy.moments=raw strategy.order=3"),
        _run("fedgta", "nobody-alike", "strategy.threshold=1"),
        _run("fedpub", "no-masks", "strategy.masks=false"),
    ]
    for method in ("fedgta", "fedpub"):
        runs += [
            _run(method, "plain"),
            _run(method, "overlapping", overlap),
            _run(method, "optimiser-reset", "strategy.optimiser=reset"),
            _run(method, "participation", half),
            _run(method, "resumed", "checkpoint_every=1", again=True),
            _run(method, "resumed-participation", "checkpoint_every=1", half, again=True),
        ]
    return runs


def _compared() -> list[Run]:
    """Give what others are compared with, on graphs that are cut in each way."""
    ways = {
        "fedavg": "partition.method=ego-networks partition.hops=1 partition.min_nodes=8",
        "fedprox": "partition.method=overlapping",
        "local": "partition.method=metis-overlapping partition.draws=2",
        "ditto": "partition.method=metis",
        "fedproto": "partition.method=dirichlet",
    }
    runs = []
    for method, way in ways.items():
        runs += [
            _run(method, "plain"),
            _run(method, "one-supernode", way, supernodes=1),
            _run(method, "participation", "strategy.participation=0.5"),
            _run(method, "resumed", "checkpoint_every=1", again=True),
        ]
    return runs


def _other_commands() -> list[Run]:
    """Tables of partitions, attacks, and settings in full."""
    runs = []
    for method, (config, small, _) in METHODS.items():
        options = ("--alone", "--rounds", "2")
        runs.append(Run(f"{method}/show", "show", config, options=("--plain",)))
        runs.append(Run(f"{method}/partition", "partition", config, small))
        if method not in ATTACKED:
            continue
        # What an attack on the masked sum guesses is up to the masks, which are random.
        plain = ("strategy.aggregation=plain", "strategy.alignment=plain")
        settings = (*small, *plain) if method == "fedscem" else small
        runs.append(Run(f"{method}/audit", "audit", config, settings, options))
    return runs


def in_process() -> list[Run]:
    """Give all runs on the in-process engine."""
    methods = [*_nfedgnn(), *_fedscem(), *_ego_baselines(), *_fedgls(), *_ppfl()]
    methods += [*_personal(), *_compared()]
    return [*methods, *_other_commands()]


def on_ray() -> list[Run]:
    """Give a run of each method, but those of few lines, through Flower's simulation engine."""
    # Two SuperNodes each, but where each client needs its own
    return [
        Run(f"ray/{method}", "run", config, (*small, "rounds=2"), ("--engine", "flwr"),
            2 if method in ATTACKED else nodes)
        for method, (config, small, nodes) in METHODS.items()
        if method not in COMPARED
    ]  # fmt: skip
