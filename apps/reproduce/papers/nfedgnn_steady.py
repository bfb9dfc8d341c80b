"""nFedGNN on Cora: how far the last round is from the best, and what tames it; in no paper."""

from flower_graph.apps.reproduce import table as t

RATE = "strategy.learning_rate"
WARM, NORM = "strategy.schedule=warmup-cosine", "strategy.gradient_norm=1"
MEAN, LOW = "strategy.server_average=0.9", f"{RATE}=0.01"
METHODS = {
    "as shipped": [],
    "schedule cosine": ["strategy.schedule=cosine"],
    "schedule warmup-cosine": [WARM],
    "gradient norm 1": [NORM],
    "server average 0.9": [MEAN],
    "warmup-cosine, gradient norm 1": [WARM, NORM],
    "warmup-cosine, server average 0.9": [WARM, MEAN],
    "gradient norm 1, server average 0.9": [NORM, MEAN],
    "learning rate 0.01, 2 × rounds": [LOW],
    "learning rate 0.01, server average 0.9, 2 × rounds": [LOW, MEAN],
    "warmup-cosine, learning rate 0.03": [WARM, f"{RATE}=0.03"],
    "warmup-cosine, learning rate 0.01, 2 × rounds": [WARM, LOW],
    "warmup-cosine, lambda 30": [WARM, "strategy.reg_weight=30"],
    "warmup-cosine, lambda 300": [WARM, "strategy.reg_weight=300"],
    "warmup-cosine, weight decay 5e-3": [WARM, "strategy.weight_decay=5e-3"],
    "warmup-cosine, weight decay 5e-5": [WARM, "strategy.weight_decay=5e-5"],
    "warmup-cosine, dropout 0.2": [WARM, "model.dropout=0.2"],
}
CHOICE, ROUNDS = ["val-accuracy-last", t.VALIDATION], [*t.PLAIN[:3], "val-accuracy-last"]
FINALISTS = [[*METHODS][number] for number in (0, 2, 6, 8, 9)]


def lines(table: str, seeds: tuple[int, ...], names: list[str], figures: list[str]) -> list[t.Line]:
    """Make a table of some methods."""
    methods = {
        name: {
            "settings": METHODS[name],
            "rounds": 400 if "2 × rounds" in name else 200,
            "paper": {t.TEST: 0.719} if (table, name) == ("Rounds", "as shipped") else {},
        }
        for name in names
    }
    line = t.Line(table=table, config="nfedgnn/cora", seeds=seeds, figures=figures)
    return line.grid(["Cora"], methods)


PAPER = t.Paper(
    title="nFedGNN: last round and best round",
    tables={
        "choice": lines("Choice", (10, 11), [*METHODS], CHOICE),
        "finalists": lines("Finalists", (10, 11, 12), FINALISTS, CHOICE),
        "rounds": lines("Rounds", (0, 1, 2), [*METHODS][:7], ROUNDS),
    },
    pictures=[t.Picture("rounds.png", "curves", {"Rounds": None})],
)
