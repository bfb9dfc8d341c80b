"""Which nodes are linked: at a server that knows some edges, and inside clients' graphs."""

from dataclasses import replace
from typing import Any

from flower_graph.apps.reproduce import table as t

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
ALL_FEATURES, FEATURES = "dot product of all features", "dot product of features"
COMMON, ADAMIC, PRODUCT = (
    {"trained": name, "figures": FIGURES, "tries": [()]}
    for name in ("common-neighbours", "adamic-adar", "feature-product")
)
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    WHOLE: {
        "centralised": {},
        DROPPED: {"settings": [*ONE, "model.input_dropout=0.5"]},
        "nFedGNN": {"config": "nfedgnn/{data}", "settings": [*USERS, "strategy.share=own"]},
        SUMMED: {"config": "nfedgnn/{data}", "settings": [*USERS, "strategy.share=summed"]},
        "common neighbours in the whole graph": COMMON,
        "Adamic-Adar in the whole graph": ADAMIC,
        ALL_FEATURES: PRODUCT,
    },
    INSIDE: {
        "local training": {"config": "local/{data}"},
        "FedAvg": {},
        "FedGTA": {"config": "fedgta/{data}"},
        "FED-PUB": {"config": "fedpub/{data}"},
        "common neighbours": COMMON,
        "Adamic-Adar": ADAMIC,
        FEATURES: PRODUCT,
    },
}
USUAL = {WHOLE: [*ONE, "model.input_dropout=0"], INSIDE: [*TEN, "model.input_dropout=0"]}
GNNS = [DROPPED, "nFedGNN", SUMMED]
CLIENTS = ["FedAvg", "FedGTA", "FED-PUB"]
OF_FEATURES = "gain-over-features"
GAINS = {
    WHOLE: [
        t.gain("centralised", *GNNS, of=AUC, name="gain"),
        t.gain("centralised", *GNNS, of=HITS, name="hits-gain"),
        t.gain(DROPPED, *GNNS[1:], of=AUC, name="gain-over-dropout"),
        t.gain(DROPPED, *GNNS[1:], of=HITS, name="hits-gain-over-dropout"),
        t.gain(ALL_FEATURES, "centralised", *GNNS, of=AUC, name=OF_FEATURES),
    ],
    INSIDE: [
        t.gain("local training", *CLIENTS, of=AUC, name="gain"),
        t.gain(FEATURES, "local training", *CLIENTS, of=AUC, name=OF_FEATURES),
    ],
}
LINE = t.Line(
    table="",
    config="fedavg/{data}",
    settings=MODEL,
    seeds=(),
    rounds=200,
    figures=[*FIGURES, "rounds"],
    # The settings that each method may try: the same two for all
    tries=[["strategy.weight_decay=0"], ["strategy.weight_decay=5e-3"]],
    choosers=(10,),
)
LINES = [
    line
    for table, methods in METHODS.items()
    for method, fields in methods.items()
    for data in ("Cora", "CiteSeer", "PubMed")
    if (data, method) != ("PubMed", DROPPED)
    for line in replace(LINE, table=table, seeds=range(3 if data == "PubMed" else 5)).grid(
        [data],
        {method: {"settings": USUAL[table], **fields}},
        GAINS[table],
        # Validation falls in the first rounds here, and is back after forty or more
        last=["patience=150"] if (data, method) == ("PubMed", SUMMED) else [],
    )
]
PAPER = t.Paper(title="Links", tables={"links": sorted(LINES, key=lambda line: bool(line.trained))})
