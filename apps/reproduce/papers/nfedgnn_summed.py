"""nFedGNN with one first layer for all users: what it has of the centralised network."""

from typing import Any

from flower_graph.apps.reproduce.table import (
    LAST,
    PROPAGATION,
    REGRESSION,
    TEST,
    VALIDATION,
    Figure,
    Line,
    Paper,
    Picture,
)

SUMMED, CENTRAL, OWN = "nFedGNN, summed", "centralised", "nFedGNN, own layers"
TRIES = [
    [f"strategy.learning_rate={rate}", f"strategy.weight_decay={decay}"]
    for decay in ("5e-4", "5e-3")
    for rate in (0.01, 0.03)
]
PLAIN = [TEST, LAST, VALIDATION, "rounds", "MiB-a-client"]
GAINS = [
    Figure("gain-over-central", TEST, CENTRAL),
    Figure("last-over-central", LAST, CENTRAL),
    Figure("gain-over-regression", TEST, REGRESSION),
    Figure("gain-over-propagation", TEST, PROPAGATION),
]
METHODS = {  # settings, figures, and what trains it
    SUMMED: (["patience=50"], [*PLAIN, *GAINS], ""),
    CENTRAL: (
        *(["patience=50"], PLAIN),
        "flower_graph.strategies.nfedgnn.central:train_centralised",
    ),
    OWN: (["patience=50"], PLAIN, ""),
    # Each feature that is not 0 is another one
    "nFedGNN, summed, scrambled features": (["data.feature_noise=1", "patience=50"], PLAIN, ""),
    REGRESSION: ([], [TEST], "logistic-regression"),
    PROPAGATION: ([], [TEST], "label-propagation"),
}
DATA = {"Cora": 4, "CiteSeer": 4, "PubMed": 2}  # settings tried


def line(table: str, data: str, method: str, **more: Any) -> Line:
    """Make a line."""
    config = f"nfedgnn/{data.lower()}{'' if method == OWN else '-summed'}"
    how: dict[str, Any] = {"config": config, "seeds": (0, 1, 2, 3, 4), "rounds": 500, **more}
    return Line(table=table, data=data, method=method, **how)


PAPER = Paper(
    title="nFedGNN: one first layer for all users",
    notes="""
Every line until validation accuracy has not improved for 50 rounds. The summed form and the
centralised network have one of four settings, on PubMed of two, by validation accuracy. MiB up are
what one user sends, sums of its SuperNode's gradients with it, of one SuperNode that hosts all.
*Sketch*: features in signed buckets, with the settings of the configs.
""",
    tables={
        "accuracy": [
            line(
                *("Accuracy", data, method),
                settings=settings,
                figures=figures,
                trained=trained,
                tries=TRIES[:tried] if method in (SUMMED, CENTRAL) else [()],
            )
            for data, tried in DATA.items()
            for method, (settings, figures, trained) in METHODS.items()
        ],
        "sketch": [
            line(
                *("Sketch", data, "nFedGNN, summed, sketched"),
                shown=f"nFedGNN, summed, sketched to {buckets}",
                keys={"buckets": buckets},
                settings=[
                    "patience=50",
                    f"strategy.sketch={'null' if buckets == 'all' else buckets}",
                ],
                figures=PLAIN,
            )
            for data in DATA
            for buckets in (64, 128, 256, 512, "all")
        ],
    },
    pictures=[
        Picture("axes-{data}.png", "axes", "sketch", {"Sketch": None}),
        Picture("curves.png", "curves", "accuracy", {"Accuracy": [SUMMED, CENTRAL, OWN]}),
    ],
)
