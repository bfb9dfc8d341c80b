"""A number of each node: homicide rates of US counties; no paper's tables."""

from flower_graph.apps.reproduce.table import Figure, Line, Paper

MSE, MAE, VALIDATION = "test-mse-at-best-val", "test-mae-at-best-val", "best-val-mse"
# The file is made by benchmarks/counties.py of commit cc717de4, in the folder in which this is run
MODEL = [
    *("data.name=counties.json", "device=cpu", "task=values", "metrics=[mse,mae]"),
    *("data.features=standardise", "model.hidden=64", "strategy.local_epochs=3"),
    *("strategy.learning_rate=0.01", "patience=20"),
]
ONE = ["partition.method=random", "partition.clients=1"]
TEN = ["partition.method=louvain", "partition.every_node=true", "partition.clients=10"]
# Each method may try the same four settings; some have settings of their own besides
FOUR = [
    [f"strategy.weight_decay={decay}", f"model.dropout={dropout}"]
    for decay in ("0", "5e-3")
    for dropout in (0, 0.5)
]
ALONE = {
    "FedProx": [[f"strategy.proximal={mu}"] for mu in (0.01, 0.1, 1)],
    "Ditto": [[f"strategy.pull={pull}"] for pull in (0.1, 1, 10)],
}
WHOLE, INSIDE = "In one place", "Inside clients"
MEAN, LINEAR = "mean of the training nodes", "linear model on all features"
IN_ONE = {"mean in one place": "mean", "linear model in one place": "linear-regression"}
UNTRAINED = {MEAN: "mean", LINEAR: "linear-regression", **IN_ONE}
METHODS = {  # by table: methods and their apps
    WHOLE: {"centralised": "fedavg", **dict.fromkeys(IN_ONE, "fedavg")},
    INSIDE: {
        "local training": "local",
        "FedAvg": "fedavg",
        "FedProx": "fedprox",
        "Ditto": "ditto",
        "FED-PUB": "fedpub",
        MEAN: "fedavg",
        LINEAR: "fedavg",
    },
}


def line(table: str, method: str, app: str) -> Line:
    """Make a line."""
    linear = LINEAR if table == INSIDE else "linear model in one place"
    changes = [Figure("change-over-linear", MSE, linear)]
    if table == INSIDE and method != "local training":
        changes += [Figure("change-over-local", MSE, "local training")]
    trained = method not in UNTRAINED
    more: list[str | Figure] = ["rounds", *changes] if trained else []
    return Line(
        table=table,
        data="US counties",
        method=method,
        config=f"{app}/own-graph",
        settings=[*MODEL, *(ONE if table == WHOLE else TEN)],
        seeds=(0, 1, 2, 3, 4),
        rounds=200,
        figures=[MSE, MAE, VALIDATION, *more],
        trained=UNTRAINED.get(method, ""),
        tries=FOUR if trained else [()],
        alone=ALONE.get(method, [()]),
        choosers=(10,),
    )


PAPER = Paper(
    title="Numbers of nodes",
    notes="""
3,085 counties of the United States, of which two are linked if they touch; the number to learn is
the homicides per 100,000 people and year around 1990. Twelve features say how people live there,
as in Baller et al. (Criminology 39(3), 2001); the figures ship with PySAL 1.14 and are made into a
graph by `benchmarks/counties.py` of commit cc717de4. Ten clients of Louvain communities, each
county at one of them, edges between them left out; 60 % of the counties train, 20 % validate, 20 %
test. Errors are over all clients' counties together. All have the same two-layer GCN with 64
hidden numbers, three local epochs a round, Adam at 0.01, and are trained until validation has not
improved for 20 rounds, at most 200. Each chooses weight decay and dropout of the same four by
validation error, FedProx its mu and Ditto its lambda too. A change is of the squared error, where
less is better.
""",
    tables={
        "values": [
            line(table, method, app)
            for table, methods in METHODS.items()
            for method, app in methods.items()
        ]
    },
)
