"""nFedGNN on Cora: how far the last round is from the best, and what tames it; in no paper."""

from flower_graph.apps.reproduce.table import LAST, TEST, VALIDATION, Line, Paper, Picture

WARM, NORM, MEAN = "schedule=warmup-cosine", "gradient_norm=1", "server_average=0.9"
LOW = "learning_rate=0.01"
METHODS = {  # settings of the strategy
    "as shipped": [],
    "schedule cosine": ["schedule=cosine"],
    "schedule warmup-cosine": [WARM],
    "gradient norm 1": [NORM],
    "server average 0.9": [MEAN],
    "warmup-cosine, gradient norm 1": [WARM, NORM],
    "warmup-cosine, server average 0.9": [WARM, MEAN],
    "gradient norm 1, server average 0.9": [NORM, MEAN],
    "learning rate 0.01, 2 × rounds": [LOW],
    "learning rate 0.01, server average 0.9, 2 × rounds": [LOW, MEAN],
    "warmup-cosine, learning rate 0.03": [WARM, "learning_rate=0.03"],
    "warmup-cosine, learning rate 0.01, 2 × rounds": [WARM, LOW],
    "warmup-cosine, lambda 30": [WARM, "reg_weight=30"],
    "warmup-cosine, lambda 300": [WARM, "reg_weight=300"],
    "warmup-cosine, weight decay 5e-3": [WARM, "weight_decay=5e-3"],
    "warmup-cosine, weight decay 5e-5": [WARM, "weight_decay=5e-5"],
    "warmup-cosine, dropout 0.2": [WARM],
}
NAMES = [*METHODS]
CHOICE, ROUNDS = ["val-accuracy-last", VALIDATION], [TEST, LAST, VALIDATION, "val-accuracy-last"]


def lines(table: str, seeds: tuple[int, ...], names: list[str], figures: list[str]) -> list[Line]:
    """Make a table of some methods."""
    return [
        Line(
            table=table,
            data="Cora",
            method=name,
            config="nfedgnn/cora",
            settings=[
                *(f"strategy.{setting}" for setting in METHODS[name]),
                *(["model.dropout=0.2"] if "dropout" in name else []),
            ],
            seeds=seeds,
            rounds=400 if "2 × rounds" in name else 200,
            figures=figures,
            paper={TEST: 0.719} if (table, name) == ("Rounds", "as shipped") else {},
        )
        for name in names
    ]


PAPER = Paper(
    title="nFedGNN: last round and best round",
    notes="""
200 rounds. *Test* and *best validation* are of the round with the best validation accuracy, *last*
of the last one. To choose one by is the validation accuracy in the last round, on seeds that the
other table does not have. *Finalists* are the best of the choice on more seeds.
""",
    tables={
        "choice": lines("Choice", (10, 11), NAMES, CHOICE),
        "finalists": lines(
            "Finalists", (10, 11, 12), [NAMES[number] for number in (0, 2, 6, 8, 9)], CHOICE
        ),
        "rounds": lines("Rounds", (0, 1, 2), NAMES[:7], ROUNDS),
    },
    pictures=[Picture("rounds.png", "curves", "rounds", {"Rounds": None})],
)
