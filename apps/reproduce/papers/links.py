"""Which nodes are linked: at a server that knows some edges, and inside clients' graphs."""

from flower_graph.apps.reproduce.table import Figure, Line, Paper

AUC, HITS = "test-auc-at-best-val", "test-hits@20-at-best-val"
FIGURES = [AUC, "test-ap-at-best-val", HITS, "test-hits@50-at-best-val", "test-mrr-at-best-val"]
FIGURES += ["best-val-auc"]
MODEL = [
    *("device=cpu", "task=links", "metrics=[auc,ap,hits@20,hits@50,mrr]"),
    *("data.features=presence", "model.hidden=64", "model.dropout=0.5"),
]
STEPS = ["strategy.local_epochs=3", "strategy.learning_rate=0.01", "patience=20"]
# All edges in one place, and all features: one client that has the whole graph
ONE = ["partition.method=random", "partition.clients=1", *STEPS]
TEN = ["partition.method=louvain", "partition.every_node=true", "partition.clients=10", *STEPS]
USERS = ["strategy.learning_rate=0.01", "patience=50", "strategy.reg_weight=0"]
DROPPED = "centralised, dropout of features"  # as the summed form drops them at its users
SUMMED = "nFedGNN, summed"
WHOLE, INSIDE = "The whole graph", "Inside clients"
# Methods without a network, by the name of their lines
BASELINES = {
    "common neighbours": "common-neighbours",
    "Adamic-Adar": "adamic-adar",
    "dot product of features": "feature-product",
}
METHODS = {  # by table and method: its app, and its settings
    (WHOLE, "centralised"): ("fedavg", [*ONE, "model.input_dropout=0"]),
    (WHOLE, DROPPED): ("fedavg", [*ONE, "model.input_dropout=0.5"]),
    (WHOLE, "nFedGNN"): ("nfedgnn", [*USERS, "strategy.share=own"]),
    (WHOLE, SUMMED): ("nfedgnn", [*USERS, "strategy.share=summed"]),
    **{
        (INSIDE, method): (app, [*TEN, "model.input_dropout=0"])
        for method, app in {
            "local training": "local",
            "FedAvg": "fedavg",
            "FedGTA": "fedgta",
            "FED-PUB": "fedpub",
        }.items()
    },
    (WHOLE, "common neighbours in the whole graph"): ("fedavg", [*ONE, "model.input_dropout=0"]),
    (WHOLE, "Adamic-Adar in the whole graph"): ("fedavg", [*ONE, "model.input_dropout=0"]),
    (WHOLE, "dot product of all features"): ("fedavg", [*ONE, "model.input_dropout=0"]),
    **{(INSIDE, name): ("fedavg", [*TEN, "model.input_dropout=0"]) for name in BASELINES},
}
IN_WHOLE = [method for table, method in METHODS if table == WHOLE][-3:]
UNTRAINED = BASELINES | dict(zip(IN_WHOLE, BASELINES.values(), strict=True))
GAINS = {  # over what; every other method that is trained in the table has them
    WHOLE: [
        ("gain", AUC, "centralised"),
        ("hits-gain", HITS, "centralised"),
        ("gain-over-dropout", AUC, DROPPED),
        ("hits-gain-over-dropout", HITS, DROPPED),
        ("gain-over-features", AUC, IN_WHOLE[-1]),
    ],
    INSIDE: [("gain", AUC, "local training"), ("gain-over-features", AUC, [*BASELINES][-1])],
}


def line(table: str, data: str, method: str) -> Line:
    """Make a line."""
    app, settings = METHODS[table, method]
    if (data, method) == ("PubMed", SUMMED):
        # Validation falls in the first rounds here, and is back after forty or more
        settings = [*settings, "patience=150"]
    gains = [
        Figure(name, of, over)
        for name, of, over in GAINS[table]
        if method != over and not (over == DROPPED and method == "centralised")
    ]
    trained = method not in UNTRAINED
    more: list[str | Figure] = ["rounds", *gains] if trained else []
    return Line(
        table=table,
        data=data,
        method=method,
        config=f"{app}/{data.lower()}",
        settings=[*MODEL, *settings],
        seeds=(0, 1, 2) if data == "PubMed" else (0, 1, 2, 3, 4),
        rounds=200,
        figures=[*FIGURES, *more],
        trained=UNTRAINED.get(method, ""),
        # The settings that each method may try: the same two for all
        tries=[["strategy.weight_decay=0"], ["strategy.weight_decay=5e-3"]] if trained else [()],
        choosers=(10,),
    )


PAPER = Paper(
    title="Links",
    notes="""
10 % of the edges are held out for validation and 20 % for the test, as PyG's `RandomLinkSplit`
does, beside as many pairs without an edge. AUC and average precision are of all pairs together,
from histograms of 1,000 bins (untrained: exact); Hits@20, Hits@50 and MRR rank each edge among the
pairs without one that are in the same graph: they compare only inside one table. *The whole graph*
is at one server that knows the edges, *inside clients* are the graphs of ten clients, Louvain
communities. All have the same two-layer GCN with 64 numbers in both layers, the dot product of its
rows, features 0/1, dropout 0.5 of the hidden layer and Adam at 0.01, and are trained until
validation has not improved for 20 rounds of three epochs (nFedGNN: 50 rounds of one step; summed
on PubMed 150), at most 200, which cut that line off. nFedGNN's server drops half of the latent
vectors too, and summed users half of their features besides; of the others only the line that says
so drops features. Each chooses its weight decay of the same two by validation AUC. *Gain* is over
centralised or local training, *gain over features* over the dot product of features, which nothing
is trained for; *hits gain* is in points of Hits@20. How to read this: [README.md](README.md).
""",
    tables={
        "links": [
            line(table, data, method)
            for table, method in METHODS
            for data in ("Cora", "CiteSeer", "PubMed")
            if (data, method) != ("PubMed", DROPPED)
        ]
    },
)
