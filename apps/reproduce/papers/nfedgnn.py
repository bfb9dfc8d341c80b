"""nFedGNN: Figures 4 to 9, Table 1, and accuracy against a privacy budget."""

from dataclasses import replace
from itertools import product
from typing import Any

from flower_graph.apps.reproduce import table as t

CENTRAL = "flower_graph.strategies.nfedgnn.method"
CITATION, WIKIPEDIA = ["Cora", "CiteSeer", "PubMed"], ["Chameleon", "Squirrel", "Wiki-CS"]
# Filtered: without duplicate nodes
FILTERED = ["Chameleon", "Chameleon-filtered", "Squirrel", "Squirrel-filtered", "Wiki-CS"]
MODELS = {
    "GCN": [],
    "GAT": ["model.name=gat", "model.dropout=0.6", "strategy.learning_rate=0.01"],
}
# Each method may try lambdas where it has one, else step sizes. The paper has the lambdas of its
# Figures 5 and 9, and step sizes of 0.1 with GCN and 0.01 with GAT.
WEIGHTS = [[f"strategy.reg_weight={weight}"] for weight in (100, 1, 300, 10)]
RATES = [[f"strategy.learning_rate={rate}"] for rate in (0.01, 0.1, 0.03, 0.003)]
# The paper's equation has no bias at the users: a variant, run for the GCN. Nor is the other in the
# paper: the users' weights averaged every few rounds, tuned for Cora alone.
OURS = NFEDGNN, NO_BIAS, AVERAGED = "nFedGNN", "nFedGNN, no user bias", "nFedGNN, averaged"
METHODS = [NFEDGNN, "lambda=0", "CNFGNN", "centralised", NO_BIAS, AVERAGED]
# Not trained by anybody; nFedGNN takes its round by validation labels, so they are spread too
UNTRAINED: dict[str, dict[str, Any]] = {
    "commonest class": {"trained": "majority", "figures": [t.TEST]},
    t.REGRESSION: t.BASELINES[t.REGRESSION],
    t.PROPAGATION: t.BASELINES[t.PROPAGATION],
    "label propagation, validation labels too": {
        "trained": f"{CENTRAL}:propagate_labels",
        "figures": [t.TEST],
    },
}
GAINS = [
    t.gain("lambda=0", *OURS, name="gain-over-lambda-0"),
    t.gain(t.REGRESSION, NFEDGNN, name="gain-over-regression"),
    t.gain(t.PROPAGATION, NFEDGNN, name="gain-over-propagation"),
    t.gain("CNFGNN", *OURS, "lambda=0"),
]
BUDGETS = t.within("20 rounds", "100 rounds", "0.005 MiB", "1 MiB")
MIB = {  # Table 1: its 34.06 is a slip, as n h 4 200 bytes are 33.06
    ("GCN", NFEDGNN): [34.06, 40.61, 240.69, 27.80, 63.49, 142.83],
    ("GCN", "CNFGNN"): [4.74e4, 1.50e5, 1.21e5, 6.47e4, 1.33e5, 4.31e4],
    ("GAT", NFEDGNN): [264.45, 324.90, 1.93e3, 222.36, 507.91, 1.14e3],
    ("GAT", "CNFGNN"): [3.79e5, 1.20e6, 9.64e5, 5.17e5, 1.06e6, 3.44e5],
}


def methods(model: str) -> dict[str, dict[str, Any]]:
    """Return the methods with their settings, and those that each may try."""
    # The paper's Table 1 counts a bias for the users of the GCN and none for those of the GAT.
    averaged = ["strategy.share=averaged", "strategy.average_every=1", "strategy.average_over=all"]
    averaged += [f"model.user_bias={str(model == 'GCN').lower()}", "strategy.reg_weight=0"]
    return {
        NFEDGNN: {"tries": WEIGHTS},
        "lambda=0": {"settings": ["strategy.reg_weight=0"], "tries": RATES},
        "CNFGNN": {"settings": averaged, "tries": RATES},
        "centralised": {"trained": f"{CENTRAL}:train_centralised", "tries": RATES},
        NO_BIAS: {"settings": ["model.user_bias=false"], "tries": WEIGHTS},
        AVERAGED: {"config": "nfedgnn/cora-averaged", "tries": WEIGHTS},
    }


LINE = t.Line(table="", config="nfedgnn/{data}", seeds=(0, 1, 2), choosers=(3, 4))


def compared(table: str, model: str, data: str) -> list[t.Line]:
    """Make the lines of a data set."""
    line = replace(LINE, table=table, model=model, settings=MODELS[model], rounds=500)
    left_out = [NO_BIAS] * (model == "GAT") + [AVERAGED] * ((table, data) != ("Figure 4", "Cora"))
    ours = {name: how for name, how in methods(model).items() if name not in left_out}
    if (table, data) == ("Figure 4", "Cora"):
        ours[NFEDGNN]["paper"], ours["centralised"]["paper"] = {t.TEST: 0.719}, {t.TEST: 0.815}
    tried = {data: 2 if data in ("PubMed", "Squirrel", "Squirrel-filtered", "Wiki-CS") else 4}
    figures = [*t.PLAIN, "MiB-a-client"]
    lines = replace(line, figures=figures).grid(tried, ours, GAINS, BUDGETS, ["patience=50"])
    lines += line.grid([data], UNTRAINED)
    if table == "Figure 4":
        # Each feature that is not 0 is another one: what of the accuracy does not need them. Lambda
        # is that of the config, which is also what was chosen for nFedGNN
        noise = ["data.feature_noise=1", "patience=50"]
        scrambled = {"figures": [*t.PLAIN, t.gain(NFEDGNN)[0]]}
        lines += line.grid([data], {"nFedGNN, scrambled features": scrambled}, last=noise)
    return lines


LAMBDAS = [0.1, 1, 10, 100, 300]


def swept(table: str, model: str, data: str) -> list[t.Line]:
    """Make the lines of all lambda as the paper has it, in 200 rounds."""
    one_seed = model == "GAT" and data in ("PubMed", "Squirrel", "Wiki-CS")
    begins = {NFEDGNN: "lambda="} | ({NO_BIAS: "no user bias, lambda="} if model == "GCN" else {})
    line = replace(LINE, table=table, model=model, settings=MODELS[model], rounds=200)
    ours = {name: {**methods(model)[name], "tries": [()]} for name in begins}
    return [
        replace(one, method=f"{begins[one.method]}{weight}", seeds=(0,) if one_seed else one.seeds)
        for weight in (LAMBDAS if data in CITATION else [1, 10, 100, 500])
        for one in line.grid([data], ours, last=[f"strategy.reg_weight={weight}"])
    ]


PRIVACY = replace(LINE, table="Privacy", rounds=200, figures=[t.TEST])
UPLINK = [
    replace(line, paper={"uplink-mib": values[number]}, tries=[()])
    for number, data in enumerate([*CITATION, *WIKIPEDIA])
    for (model, method), values in MIB.items()
    for line in replace(
        PRIVACY, table="Table 1", model=model, settings=MODELS[model], figures=["uplink-mib"]
    ).grid([data], {method: {**methods(model)[method], "seeds": (0,)}})
]
GUESS = "commonest class"
NOISY = {  # chosen among by the first seed
    "figures": ["epsilon-of-a-round", "noise-multiplier", t.TEST],
    "tries": [
        [f"privacy.clipping_norm={norm}", f"strategy.reg_weight={weight}", f"rounds={rounds}"]
        for norm, weight, rounds in product((0.1, 0.3, 1.0), (1.0, 100.0), (50, 200))
    ],
    "choosers": (0,),
    "rounds": None,
}
BUDGET = [  # a curve of accuracy against a budget
    *PRIVACY.grid(["Cora"], {GUESS: {**UNTRAINED[GUESS], "seeds": (0,)}, "nFedGNN, no noise": {}}),
    *PRIVACY.grid(
        ["Cora"],
        {"nFedGNN, with noise": NOISY},
        # Most are far beyond what protects anybody, to show where it begins to work.
        over={"epsilon": {10.0**n: [f"privacy.epsilon={10.0**n}"] for n in range(7)}},
    ),
]
SWEPT = [f"lambda={weight}" for weight in LAMBDAS]
GCN = {"Figure 4": CITATION, "Figure 6": FILTERED}
GAT = {"Figure 7": CITATION, "Figure 8": FILTERED}
PAPER = t.Paper(
    title="nFedGNN: the paper's comparison",
    tables={
        "comparison": [
            line
            for model, figures in {"GCN": GCN, "GAT": GAT}.items()
            for table, names in figures.items()
            for data in names
            for line in compared(table, model, data)
        ],
        "lambda": [
            line
            for table, model in (("Figure 5", "GCN"), ("Figure 9", "GAT"))
            for data in (*CITATION, *WIKIPEDIA)
            for line in swept(table, model, data)
        ],
        "uplink": UPLINK,
        "privacy": BUDGET,
    },
    on_request=["privacy"],
    pictures=[
        t.Picture(f"figure-{number}.png", {f"Figure {number}": names}, data)
        for number, names, data in (
            *((4, METHODS, CITATION), (5, SWEPT, CITATION), (6, METHODS, WIKIPEDIA)),
            *((7, METHODS, CITATION), (8, METHODS, WIKIPEDIA), (9, SWEPT, CITATION)),
        )
    ],
)
