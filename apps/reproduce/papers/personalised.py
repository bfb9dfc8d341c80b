"""FedGTA and FED-PUB beside baselines, on disjoint and on overlapping clients."""

from flower_graph.apps.reproduce.table import (
    BASELINES,
    LAST,
    REGRESSION,
    TEST,
    VALIDATION,
    Figure,
    Line,
    Paper,
    Picture,
)

LOCAL, NO_MASKS = "local training", "FED-PUB, no masks"
APPS = {  # by method: its config, and its settings; the first four are FedGLS's baselines
    LOCAL: ("fedgls", ["strategy.name=local-gnn-knn", "graph.graphless_ratio=0"]),
    "FedAvg": ("fedgls", ["strategy.name=fed-gnn", "graph.graphless_ratio=0"]),
    "Fed-MLP": ("fedgls", ["strategy.name=fed-mlp", "graph.graphless_ratio=0"]),
    "FedProto": ("fedgls", ["strategy.name=fedproto", "graph.graphless_ratio=0"]),
    "FedGTA": ("fedgta", []),
    "FED-PUB": ("fedpub", []),
    NO_MASKS: ("fedpub", ["strategy.masks=false"]),
    "local (app)": ("local", []),
    "FedAvg (app)": ("fedavg", []),
    "FedProx": ("fedprox", []),
    "Ditto": ("ditto", []),
    "FedProto (app)": ("fedproto", []),
    **dict.fromkeys(BASELINES, ("fedgls", [])),
}
# PubMed's own values are so small that the weight of FED-PUB's masks outweighs what they tell, and
# the masks vanish: all see features 0/1.
MODEL = [
    *("device=cpu", "data.features=presence", "partition.ratios=[0.2,0.4,0.4]"),
    *("partition.clients=10", "model.hidden=64", "model.dropout=0.5", "model.input_dropout=0"),
    *("strategy.local_epochs=3", "strategy.learning_rate=0.01", "strategy.optimiser=keep"),
    "patience=50",
]
LOUVAIN = ["partition.method=louvain", "partition.every_node=true"]
OVERLAPPING = ["partition.method=metis-overlapping"]
# Each method may try the same weight decays; some have settings of their own besides
DECAYS = [[f"strategy.weight_decay={decay}"] for decay in ("0", "5e-4", "5e-3")]
ALONE = {
    "FedProx": [[f"strategy.proximal={mu}"] for mu in (0.01, 0.1, 1, 10)],
    "Ditto": [[f"strategy.pull={pull}"] for pull in (0.01, 0.1, 1, 10)],
}
PLAIN = [TEST, LAST, VALIDATION, "rounds", "steps-a-client", "MiB-a-client"]
GTA = ["FedAvg", "FedGTA", "FED-PUB"]
GAINS = [  # over what, and of which methods
    ("gain-over-fedavg", "FedAvg", ["FedGTA", "FED-PUB", NO_MASKS]),
    ("gain-over-local training", LOCAL, [*GTA, NO_MASKS]),
    ("gain-over-regression", REGRESSION, [LOCAL, *GTA]),
    ("gain-of-masks", NO_MASKS, ["FED-PUB"]),
    ("gain-over-fedavg (app)", "FedAvg (app)", ["FedProx", "Ditto"]),
    (
        "gain-over-local (app)",
        "local (app)",
        ["FedAvg (app)", "FedProx", "Ditto", "FedProto (app)"],
    ),
]


def lines(table: str, methods: list[str], cut: list[str]) -> list[Line]:
    """Make a table; what is tried is tried on communities, which no two clients share a node of."""
    return [
        Line(
            table=table,
            data=data,
            method=method,
            config=f"{APPS[method][0]}/{data.lower()}",
            settings=[*MODEL, *APPS[method][1], *cut],
            seeds=(0, 1, 2),
            rounds=300,
            trained=BASELINES.get(method, ""),
            figures=[TEST]
            if method in BASELINES
            else [*PLAIN, *(Figure(n, TEST, over) for n, over, ours in GAINS if method in ours)],
            tries=[()] if method in BASELINES else DECAYS,
            alone=ALONE.get(method, [()]),
            tried_on=LOUVAIN,
        )
        for data in ("Cora", "CiteSeer", "PubMed")
        for method in methods
    ]


ALL = [*APPS][:7]
LOUVAIN_TABLE, OVERLAPPING_TABLE = "Louvain communities", "Overlapping clients"
PAPER = Paper(
    title="FedGTA and FED-PUB beside baselines",
    notes="""
10 clients: of Louvain communities to which every node is assigned, or overlapping, half of the
nodes of each of 2 METIS parts, drawn five times. All have the same two-layer GCN (Fed-MLP: without
edges) with 64 hidden numbers, 3 local epochs a round, Adam at 0.01, split 20/40/40, features 0/1,
and are trained until validation has not improved for 50 rounds, at most 300. Each chooses its
weight decay of the same three by validation accuracy on communities, and FedProx its mu and Ditto
its lambda of four. The apps are each one file; tests of theirs are corrected for each other alone.
How to read this: [README.md](README.md).
""",
    tables={
        "louvain": lines(LOUVAIN_TABLE, [*ALL, *BASELINES], LOUVAIN),
        "apps": lines(
            "Apps on Louvain communities",
            ["local (app)", "FedAvg (app)", "FedProx", "Ditto", "FedProto (app)"],
            LOUVAIN,
        ),
        "overlapping": lines(OVERLAPPING_TABLE, [*ALL[:6], *BASELINES], OVERLAPPING),
    },
    pictures=[
        *(
            Picture(f"{group}.png", "intervals", group, {table: [*ALL, REGRESSION]})
            for group, table in (("louvain", LOUVAIN_TABLE), ("overlapping", OVERLAPPING_TABLE))
        ),
        Picture(
            *("axes-{data}.png", "axes", "louvain", {LOUVAIN_TABLE: ALL}),
            options={"marked": [LOCAL, "FedAvg", "FedGTA", "FED-PUB", NO_MASKS]},
        ),
    ],
)
