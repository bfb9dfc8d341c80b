"""Floors are complete: whatever of a run's settings can raise what leaks is bounded by a floor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_graph.config.schema import known_keys
from flower_graph.errors import RefusedError
from flower_graph.method.load import load_config
from flower_graph.method.permits import PROMISES, Permits
from flower_graph.method.registry import known_apps, method_named
from flower_graph.privacy.accountant import noise_multiplier

# Every other key, by what it is: a name that ends in a dot stands for a section. A new key is in
# neither list until somebody has asked whether a server learns more by turning it.
OTHERS = {
    "what is trained, and how: it changes what is protected, not how": """
        data.label data.weight data.decimal model. gat. deepwalk. graph. links. judge. task seed
        strategy.absent strategy.average_every strategy.average_over strategy.batch_size
        strategy.beta strategy.block_density strategy.block_nodes strategy.blocks
        strategy.gradient_norm strategy.l1 strategy.learning_rate strategy.local_epochs
        strategy.masks strategy.moments strategy.mu strategy.newcomers_alone strategy.norm_scale
        strategy.optimiser strategy.order strategy.prototype_weight strategy.proximal strategy.pull
        strategy.reg_weight strategy.resolution strategy.restart strategy.rotations_only
        strategy.schedule strategy.server_average strategy.sketch strategy.steps strategy.tau
        strategy.temperature strategy.threshold strategy.variant strategy.weight_decay
        strategy.evaluate_every""",
    "a SuperNode's own data: its data folder's manifest has them, and another run is refused": """
        partition. data.active data.categories data.classes data.degree data.feature_noise
        data.features data.homophily data.missing data.no_features data.nodes data.num_features
        data.num_test data.num_val data.ratios data.remove data.signal data.split
        data.split_seed data.train_per_class""",
    "what is written, each on its own machine": """
        checkpoint_every every keep save track metrics strategy.state""",
    "which method's code: the node config's `methods`": "app",
    "who takes part, and when it ends: sums of too few are `least-clients`' to refuse": """
        patience strategy.min_nodes strategy.most_supernodes strategy.num_malicious
        strategy.participation strategy.robust strategy.timeout strategy.dropout strategy.limit""",
    "under a budget refused; else a masked sum as the others": "strategy.model_sharing",
    "the server's own copy; each SuperNode reads its own": "strategy.registry",
    "the run's to say": "device",
}
FLOORED = {key for settings in PROMISES.values() for key in settings}


def kinds_of(key: str) -> list[str]:
    section = key.partition(".")[0] + "."
    found = [why for why, keys in OTHERS.items() if {key, section} & set(keys.split())]
    return found + ["floor"] * (key in FLOORED)


@pytest.mark.parametrize("app", sorted(known_apps()))
def test_every_key_has_a_floor_or_a_reason(app: str) -> None:
    kinds = {key: kinds_of(key) for key in known_keys(method_named(app).schema)}
    assert {key: kind for key, kind in kinds.items() if len(kind) != 1} == {}


def test_every_listed_key_is_there() -> None:
    known = {key for app in known_apps() for key in known_keys(method_named(app).schema)}
    known |= {key.partition(".")[0] + "." for key in known if "." in key}
    listed = {word for keys in OTHERS.values() for word in keys.split()} | FLOORED
    assert listed <= known


def test_the_page_names_what_each_promise_depends_on() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "limits.md").read_text("utf-8")
    table = page.partition("## Floors")[2].partition("\n## ")[0]
    named = set(re.findall("`([^`]+)`", table))
    assert {*PROMISES, *FLOORED} <= named


# Of each limit: a run that it permits, and each way to turn a setting of it for the worse
NOISE = ("privacy.epsilon=2", "privacy.clipping_norm=5")
MASKED = ("nfedgnn/cora-summed", ("strategy.aggregation=masked",))
RUNS: dict[str, tuple[Any, str, tuple[str, ...], tuple[str, ...]]] = {
    "most-epsilon": (2, "nfedgnn/cora", NOISE, (
        "privacy.epsilon=3", "privacy.epsilon=null", "privacy.delta=0.5", "privacy.delta=2e-5",
        "privacy.measurements=report")),
    "least-noise": (0.1, "nfedgnn/cora", NOISE, (
        "privacy.epsilon=1e6", "privacy.epsilon=null", "privacy.measurements=report")),
    "most-clip": (5, "nfedgnn/cora", NOISE, (
        "privacy.clipping_norm=6", "privacy.epsilon=null", "privacy.measurements=report")),
    "most-delta": (1e-5, "nfedgnn/cora", NOISE, (
        "privacy.delta=0.9", "privacy.epsilon=null", "privacy.measurements=report")),
    "least-clients": (5, "fedscem/cora-linqs", (), (
        "strategy.aggregation=plain", "strategy.alignment=plain",
        "strategy.name=fedavg")),
    "least-holders": (3, "fedscem/cora-linqs", ("strategy.least_holders=3",),
                      ("strategy.least_holders=2",)),
    "differ-by": (3, "fedscem/cora-linqs",
                  ("strategy.trust=malicious-server", "strategy.differ_by=3"),
                  ("strategy.differ_by=2",)),
    "allow-trust": ("semi-honest", "fedscem/cora-linqs", (), (
        "strategy.aggregation=plain", "strategy.alignment=plain", "strategy.name=fedavg",
        "strategy.trust=malicious-server")),
}  # fmt: skip


@pytest.mark.parametrize("floor", RUNS)
def test_each_setting_that_a_promise_depends_on_is_held(floor: str) -> None:
    value, name, permitted, worse = RUNS[floor]
    permits = Permits.of({floor: value})
    permits.check(load_config(name, permitted))
    for one in worse:
        with pytest.raises(RefusedError, match="node config has"):
            permits.check(load_config(name, (*permitted, one)))


def test_what_central_noise_is_worth_is_the_servers_to_say() -> None:
    run = load_config("fedgls/cora-linqs", ("strategy.name=fed-gnn", "privacy.epsilon=2"))
    Permits.of({"most-epsilon": 2}).check(run)
    central = ("strategy.name=fed-gnn", "privacy.epsilon=2", "privacy.form=central")
    for floor in ("most-epsilon", "least-noise", "most-clip", "most-delta"):
        with pytest.raises(RefusedError, match=floor):
            Permits.of({floor: 0.9}).check(load_config("fedgls/cora-linqs", central))


def test_no_budget_at_the_floors_has_less_noise_than_that_of_the_floors() -> None:
    """Drawn runs: all that `most-epsilon` lets through have the noise that it stands for."""
    rng, permits = np.random.default_rng(0), Permits.of({"most-epsilon": 2})
    least, taken = noise_multiplier(2.0, 1e-5, 1), 0
    for _ in range(40):
        epsilon, delta = float(rng.uniform(0.5, 4)), float(10 ** rng.uniform(-7, -0.01))
        rounds = int(rng.integers(1, 400))
        overrides = (f"privacy.epsilon={epsilon}", f"privacy.delta={delta}", f"rounds={rounds}")
        config = load_config("nfedgnn/cora", overrides)
        try:
            permits.check(config)
        except RefusedError:
            continue
        taken += 1
        assert noise_multiplier(epsilon, delta, rounds) >= least
    assert taken
