"""The runs whose behaviour is frozen, as words of the command line.

Not here: strategies that users compose of Flower's classes, clients that come, go or lie, and data
folders of single parties. Each of these has tests of its own.
"""

import re
from typing import NamedTuple


class Run(NamedTuple):
    """One call of a command; ``supernodes``: 0 for commands that take none.

    With ``again`` the last checkpoint and the result are removed, and ``--resume`` goes on.
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
    "data.name=csbm data.nodes=90 data.classes=3 data.degree=5 data.num_features=24 data.active=6 "
    "device=cpu"
)
THIRDS = "partition.ratios=[0.3,0.3,0.4]"
BUDGET = "privacy.epsilon=100 privacy.clipping_norm=0.5"
SHOWN = f"{BUDGET} privacy.measurements=report"
HALF, CENTRAL = "strategy.participation=0.5", "privacy.form=central"
ROBUST = {
    "krum": "strategy.robust=krum strategy.num_malicious=1",
    "trimmed-mean": "strategy.robust=trimmed-mean strategy.beta=0.25",
    "median": "strategy.robust=median",
}

NFEDGNN = (
    f"{SMALL} data.split=random data.train_per_class=8 data.num_val=20 data.num_test=30 rounds=3 "
    "model.hidden=4"
)
FEDSCEM = (
    f"{SMALL} rounds=3 partition.clients=6 partition.min_nodes=5 partition.hops=1 model.hidden=6 "
    "model.projection=4 strategy.learning_rate=0.01"
)
FEDGLS = (
    f"{SMALL} rounds=3 partition.clients=4 graph.neighbours=4 model.hidden=6 "
    "strategy.local_epochs=2"
)
PPFL = (
    f"{SMALL} data.nodes=120 {THIRDS} rounds=2 partition.clients=3 model.dimension=6 "
    "deepwalk.walks=2 deepwalk.length=8 gat.epochs=3 judge.folds=2 judge.every=2 judge.mlp=false"
)
LPGNN = f"{NFEDGNN} privacy.epsilon=null strategy.hops=2"  # noise is of the operating system's
PERSONAL = f"{SMALL} {THIRDS} rounds=3 partition.clients=4 model.hidden=6"
COMPARED = ("fedavg", "fedprox", "local", "ditto", "fedproto", "scaffold", "moon", "fedopt")
# Name of a method, its config, settings under which it is small, and SuperNodes
METHODS = {
    name: (config, tuple(small.split()), nodes)
    for name, config, small, nodes in (
        ("nfedgnn", "nfedgnn/cora", NFEDGNN, 3),
        ("fedscem", "fedscem/cora-linqs", FEDSCEM, 4),
        ("fedgls", "fedgls/cora-linqs", FEDGLS, 4),
        ("deepwalk", "ppfl/cora-linqs-deepwalk", PPFL, 3),
        ("gat", "ppfl/cora-linqs-gat", PPFL, 3),
        ("fedgta", "fedgta/cora-linqs", PERSONAL, 4),
        ("fedpub", "fedpub/cora-linqs", f"{PERSONAL} strategy.block_nodes=20", 4),
        *((name, f"{name}/cora-linqs", PERSONAL, 4) for name in (*COMPARED, "fedgcn")),
        ("lpgnn", "lpgnn/cora-linqs", LPGNN, 3),
    )
}
# Runs in which a choice hangs on the last bit of a sum, which other machines round otherwise. The
# generated features are zeros and ones, so that many nodes are equally near to each other: rounding
# says which of them a learnt graph or one of nearest neighbours joins. Krum takes one of clients
# that are about equally near, and an attack's precision depends on an order.
DECIDED_BY_ROUNDING = re.compile(
    r"^fedgls(?!/(fed-gnn$|fed-gnn-(central|participation|resumed)|none-graphless"
    r"|fed-mlp|fed-gnn-mlp|fedproto|partition|show))|krum|/audit$"
)
WHO = {"one-supernode": "", "participation": HALF, "resumed": "", "resumed-participation": HALF}
ATTACKED = ("nfedgnn", "fedscem", "fedgls", "deepwalk", "gat")


def _runs(method: str, variants: dict[str, str], supernodes: int | None = None) -> list[Run]:
    """Make variants of a method, by name and settings; one that is resumed has checkpoints."""
    config, small, nodes = METHODS[method]
    runs = []
    for variant, settings in variants.items():
        again, alone = "resumed" in variant, variant == "one-supernode"
        words = (*small, *settings.split(), *["checkpoint_every=1"] * again)
        count = supernodes or (1 if alone else nodes)
        runs.append(Run(f"{method}/{variant}", "run", config, words, (), count, again))
    return runs


def _bundled(method: str, *settings: str) -> Run:
    words = ("rounds=2", "device=cpu", *settings)
    return Run(f"{method}/bundled", "run", f"{method}/cora-linqs", words, (), 2)


def _nfedgnn() -> list[Run]:
    gat, sage = "model.name=gat model.heads=2", "model.name=sage"
    averaged = "strategy.share=averaged strategy.average_every=2 strategy.average_over=holders"
    over_all = "strategy.share=averaged strategy.average_over=all strategy.average_every="
    summed = "strategy.share=summed strategy.reg_weight=null"
    variants = {
        "gcn": "",
        **WHO,
        "gat": gat,
        "sage": sage,
        "no-smoothness": "strategy.reg_weight=0",
        "no-user-bias": "model.user_bias=false",
        "averaged": averaged,
        "averaged-gat": f"{averaged} {gat}",
        "cnfgnn": f"{over_all}1 strategy.reg_weight=0",
        "averaged-over-all-sage": f"{over_all}2 {sage}",
        "summed": summed,
        "summed-gat": f"{summed} {gat}",
        "summed-sage-sketch": f"{summed} {sage} strategy.sketch=8",
        "resumed-summed": f"{summed} {HALF}",
        "participation-averaged": f"{HALF} {averaged}",
        "ratios": "data.ratios=[0.5,0.2,0.3] data.features=as-is",
        "noise": BUDGET,
        "noise-gat": f"{BUDGET} {gat}",
        "noise-shown": SHOWN,
        "noise-participation": f"{BUDGET} {HALF}",
        "resumed-averaged": averaged,
        "resumed-schedule": f"rounds=5 strategy.schedule=warmup-cosine {HALF}",
    }
    few, both = (*NFEDGNN.split(), "rounds=2"), ("--seeds", "1,2")
    seeds = Run("nfedgnn/seeds", "run", "nfedgnn/cora", few, both, 1)
    bundled = Run("nfedgnn/bundled", "run", "nfedgnn/cora-linqs", ("rounds=2", "device=cpu"), (), 2)
    return [bundled, seeds, *_runs("nfedgnn", variants)]


def _lpgnn() -> list[Run]:
    variants = {"gcn": "", **WHO, "sage": "model.name=sage", "gat": "model.name=gat model.heads=2"}
    return _runs("lpgnn", variants | {"random": "strategy.features=random"})


def _fedscem() -> list[Run]:
    plain = "strategy.aggregation=plain strategy.alignment=plain"
    variants = {
        "full": "",
        **WHO,
        "iter": "strategy.variant=iter",
        "minus": "strategy.variant=minus",
        "unmasked": "strategy.aggregation=plain",
        "plain": plain,
        "plain-alignment": "strategy.alignment=plain",
        "two-epochs": f"strategy.local_epochs=2 {plain}",
        "global-split": f"partition.split=global {plain}",
        "two-hops": f"partition.hops=2 {plain}",
        "participation-plain": f"{HALF} {plain}",
        "noise": f"{BUDGET} strategy.limit=4096",
        "noise-shown": f"{SHOWN} strategy.limit=4096",
        "noise-plain": f"{SHOWN} {plain}",
        "resumed-plain": plain,
    }
    for sharing in ("fedavg", "fedprox"):
        shared = f"strategy.resolution=1e-6 strategy.model_sharing={sharing}"
        variants[f"{sharing}+fedscem"] = shared
        variants[f"{sharing}+plain"] = f"{shared} {plain}"
        variants[f"{sharing}+minus"] = f"{shared} strategy.variant=minus"
    bundled = _bundled("fedscem", "partition.clients=6", *plain.split())
    return [bundled, *_runs("fedscem", variants)]


def _ego_baselines() -> list[Run]:
    runs = []
    for name in ("self-training", "fedavg", "fedprox", "local-sage", "fed-sage"):
        setting = f"strategy.name={name}" + " rounds=2" * ("sage" in name)
        runs += _runs("fedscem", _usual(name, setting))
    for name in ("fedavg", "fedprox"):
        setting = f"strategy.name={name}"
        noise = {
            f"{name}-noise": f"{setting} {BUDGET}",
            f"{name}-central": f"{setting} {BUDGET} {CENTRAL}",
            f"{name}-central-shown": f"{setting} {SHOWN} {CENTRAL}",
        }
        robust = {f"{name}-{how}": f"{setting} {words}" for how, words in ROBUST.items()}
        runs += _runs("fedscem", noise | robust, supernodes=6)  # one each
    return runs


def _usual(name: str, setting: str) -> dict[str, str]:
    return {name: setting, f"{name}-participation": f"{setting} {HALF}", f"{name}-resumed": setting}


def _fedgls() -> list[Run]:
    variants = {
        "attentive-cosine": "",
        **WHO,
        "attentive-euclidean": "graph.similarity=euclidean",
        "attentive-inner": "graph.similarity=inner",
        "mlp-cosine": "graph.encoder=mlp graph.width=5",
        "mlp-euclidean": "graph.encoder=mlp graph.similarity=euclidean",
        "mlp-inner": "graph.encoder=mlp graph.similarity=inner graph.layers=1",
        "all-graphless": "graph.graphless_ratio=1",
        "none-graphless": "strategy.name=fed-gnn graph.graphless_ratio=0",
        "optimiser-reset": "strategy.optimiser=reset",
        **{way: f"partition.method={way}" for way in ("metis", "dirichlet", "random")},
        "noise": BUDGET,
        "noise-shown": SHOWN,
        "central": f"{BUDGET} {CENTRAL}",
        "central-shown": f"{SHOWN} {CENTRAL}",
        "resumed-reset": "strategy.optimiser=reset",
        **ROBUST,
    }
    for name in ("fed-mlp", "fed-gnn-mlp", "fedproto", "local-gnn-knn", "fed-gnn-knn", "fed-gnn"):
        variants |= _usual(name, f"strategy.name={name}")
    variants |= {
        "fed-gnn-central": f"strategy.name=fed-gnn {SHOWN} {CENTRAL}",
        "fed-mlp-noise": f"strategy.name=fed-mlp {SHOWN}",
        "fed-gnn-knn-median": "strategy.name=fed-gnn-knn strategy.robust=median",
        "fedproto-weight": "strategy.name=fedproto strategy.prototype_weight=3",
    }
    return [_bundled("fedgls"), *_runs("fedgls", variants)]


def _ppfl() -> list[Run]:
    most = "strategy.participation=0.67"
    variants = {
        "pairs": "",
        "one-supernode": "",
        "consensus": "strategy.alignment=consensus",
        "secure": "strategy.alignment=secure",
        "local": "strategy.name=local",
        "participation": most,
        "last": f"{most} strategy.absent=last rounds=3",
        "participation-consensus": f"{most} strategy.alignment=consensus",
        "noise": BUDGET,
        "noise-consensus": f"{SHOWN} strategy.alignment=consensus",
        "resumed": "rounds=3",
        "resumed-last": f"{most} strategy.absent=last rounds=3",
        "resumed-secure": "strategy.alignment=secure",
        "resumed-local": "strategy.name=local",
    }
    deepwalk = {
        "judged-by-mlp": "judge.mlp=true judge.every=1",
        "degree": "partition.public=degree",
        "cover": "partition.public=cover",
    }
    gat = {"label-noise": "partition.label_noise=0.3", "heads": "gat.heads=2 gat.beta=0"}
    both = [*_runs("deepwalk", variants), *_runs("gat", variants)]
    return [*both, *_runs("deepwalk", deepwalk), *_runs("gat", gat)]


def _personal() -> list[Run]:
    """FedGTA, FED-PUB and what others are compared with, on graphs that are cut in each way."""
    overlapping = "partition.method=metis-overlapping partition.draws=2"
    variants = {
        "plain": "",
        "overlapping": overlapping,
        "optimiser-reset": "strategy.optimiser=reset",
    }
    variants |= {name: words for name, words in WHO.items() if name != "one-supernode"}
    raw = {"raw": "strategy.moments=raw strategy.order=3", "nobody-alike": "strategy.threshold=1"}
    runs = _runs("fedgta", raw | variants)
    runs += _runs("fedpub", {"no-masks": "strategy.masks=false"} | variants)
    ways = {
        "fedavg": "partition.method=ego-networks partition.hops=1 partition.min_nodes=8",
        "fedprox": "partition.method=overlapping",
        "local": overlapping,
        "ditto": "partition.method=metis",
        "fedproto": "partition.method=dirichlet",
        "scaffold": overlapping,
        "moon": "partition.method=metis",
        "fedopt": "partition.method=dirichlet",
    }
    hops = {"no-hops": "strategy.hops=0", "one-hop": "strategy.hops=1"}
    runs += _runs("fedgcn", {"plain": "", "few": "strategy.least_holders=3", **hops, **WHO})
    for method, way in ways.items():
        variants = {"plain": "", "one-supernode": way, "participation": HALF, "resumed": ""}
        runs += _runs(method, variants)
    return runs


def _other_commands() -> list[Run]:
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
    methods = [*_nfedgnn(), *_fedscem(), *_ego_baselines(), *_fedgls(), *_ppfl(), *_personal()]
    methods += _lpgnn()
    return [*methods, *_other_commands()]
