"""FedGTA and FED-PUB beside baselines, on disjoint and on overlapping clients."""

from typing import Any

from flower_graph.apps.reproduce import table as t

LOCAL, NO_MASKS = "local training", "FED-PUB, no masks"
METHODS: dict[str, dict[str, Any]] = {  # the first four are FedGLS's baselines
    LOCAL: {"settings": ["strategy.name=local-gnn-knn", "graph.graphless_ratio=0"]},
    "FedAvg": {"settings": ["strategy.name=fed-gnn", "graph.graphless_ratio=0"]},
    "Fed-MLP": {"settings": ["strategy.name=fed-mlp", "graph.graphless_ratio=0"]},
    "FedProto": {"settings": ["strategy.name=fedproto", "graph.graphless_ratio=0"]},
    "FedGTA": {"config": "fedgta/{data}"},
    "FED-PUB": {"config": "fedpub/{data}"},
    NO_MASKS: {"config": "fedpub/{data}", "settings": ["strategy.masks=false"]},
    "local (app)": {"config": "local/{data}"},
    "FedAvg (app)": {"config": "fedavg/{data}"},
    # Two have settings of their own, besides the weight decays that each method may try
    "FedProx": {
        "config": "fedprox/{data}",
        "alone": [[f"strategy.proximal={mu}"] for mu in (0.01, 0.1, 1, 10)],
    },
    "Ditto": {
        "config": "ditto/{data}",
        "alone": [[f"strategy.pull={pull}"] for pull in (0.01, 0.1, 1, 10)],
    },
    "FedProto (app)": {"config": "fedproto/{data}"},
    **t.BASELINES,
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
APPS = ["local (app)", "FedAvg (app)", "FedProx", "Ditto", "FedProto (app)"]
GTA = ["FedAvg", "FedGTA", "FED-PUB"]
GAINS = [  # over what, and of which methods
    (t.Figure("gain-over-fedavg", t.TEST, "FedAvg"), ["FedGTA", "FED-PUB", NO_MASKS]),
    (t.Figure("gain-over-local training", t.TEST, LOCAL), [*GTA, NO_MASKS]),
    (t.Figure("gain-over-regression", t.TEST, t.REGRESSION), [LOCAL, *GTA]),
    (t.Figure("gain-of-masks", t.TEST, NO_MASKS), ["FED-PUB"]),
    (t.Figure("gain-over-fedavg (app)", t.TEST, "FedAvg (app)"), ["FedProx", "Ditto"]),
    (t.Figure("gain-over-local (app)", t.TEST, "local (app)"), APPS[1:]),
]


def lines(table: str, methods: list[str], cut: list[str]) -> list[t.Line]:
    """Make a table; what is tried is tried on communities, which no two clients share a node of."""
    line = t.Line(
        table=table,
        config="fedgls/{data}",
        settings=MODEL,
        seeds=(0, 1, 2),
        rounds=300,
        figures=[*t.PLAIN, "steps-a-client", "MiB-a-client"],
        tries=[[f"strategy.weight_decay={decay}"] for decay in ("0", "5e-4", "5e-3")],
        tried_on=LOUVAIN,
    )
    ours = {name: METHODS[name] for name in methods}
    return t.grid(line, ["Cora", "CiteSeer", "PubMed"], ours, GAINS, last=cut)


ALL = [*METHODS][:7]
SHOWN = [*ALL, t.REGRESSION]
LOUVAIN_TABLE, OVERLAPPING_TABLE = "Louvain communities", "Overlapping clients"
PAPER = t.Paper(
    title="FedGTA and FED-PUB beside baselines",
    tables={
        "louvain": lines(LOUVAIN_TABLE, [*ALL, *t.BASELINES], LOUVAIN),
        "apps": lines("Apps on Louvain communities", APPS, LOUVAIN),
        "overlapping": lines(OVERLAPPING_TABLE, [*ALL[:6], *t.BASELINES], OVERLAPPING),
    },
    pictures=[
        t.Picture("louvain.png", "intervals", {LOUVAIN_TABLE: SHOWN}),
        t.Picture("overlapping.png", "intervals", {OVERLAPPING_TABLE: SHOWN}),
        t.Picture(
            *("axes-{data}.png", "axes", {LOUVAIN_TABLE: ALL}),
            options={"marked": [LOCAL, "FedAvg", "FedGTA", "FED-PUB", NO_MASKS]},
        ),
    ],
)
