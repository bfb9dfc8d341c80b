"""What a SuperNode's node config permits: a server that asks for less is refused, by the floor."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import ALL, Federation
from flwr.app import Context, RecordDict
from sum_helpers import write_keys
from test_what_leaves_a_machine import NODE, asked

from flower_graph.apps.cli.main import main
from flower_graph.apps.client_app import app
from flower_graph.apps.run import client_app
from flower_graph.config.schema import known_keys
from flower_graph.errors import ConfigError, NoClientsError, RefusedError
from flower_graph.method.load import load_config
from flower_graph.method.permits import Permits, configured_client
from flower_graph.method.registry import known_apps, method_named, method_of
from flower_graph.secure.node_config import least_clients
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import PrepareRequest

CORA, SUMMED, SCEM = "nfedgnn/cora", "nfedgnn/cora-summed", "fedscem/cora-linqs"
GLS, GAT = "fedgls/cora-linqs", "ppfl/cora-linqs-gat"
ONCE = "lpgnn/cora-linqs"
NOISE = "privacy.epsilon=2 privacy.clipping_norm=5"
CENTRAL = "strategy.name=fed-gnn privacy.epsilon=2 privacy.form=central"
LIES = "strategy.aggregation=masked strategy.trust=malicious-server"
SECURE, DISTRUSTING = "strategy.alignment=secure", "strategy.trust=malicious-server"
PLAINER = ("strategy.aggregation=plain", "strategy.alignment=plain", "strategy.name=fedavg")
# A floor, a run that it permits (None: none is here), and ways to turn a setting for the worse
HELD: tuple[tuple[str, Any, str, str | None, tuple[str, ...]], ...] = (
    ("most-epsilon", 2, CORA, NOISE, (
        "privacy.epsilon=3", "privacy.epsilon=1000000", "privacy.epsilon=null",
        "privacy.delta=0.5", "privacy.delta=2e-5", "privacy.measurements=report")),
    ("most-epsilon", 2, GLS, "strategy.name=fed-gnn privacy.epsilon=2", ("privacy.form=central",)),
    # What central noise is worth is the server's to say
    *((f, 0.9, GLS, None, (CENTRAL,)) for f in ("least-noise", "most-clip", "most-delta")),
    ("most-epsilon", 2, ONCE, "privacy.epsilon=2 strategy.label_epsilon=1", (
        "privacy.epsilon=3", "privacy.epsilon=null strategy.label_epsilon=null")),
    ("least-noise", 1e-9, ONCE, None, ("privacy.epsilon=0.01",)),
    ("least-noise", 0.1, CORA, NOISE, (
        "privacy.epsilon=1e6", "privacy.epsilon=null", "privacy.measurements=report")),
    ("least-noise", 1, CORA, None, ("privacy.epsilon=1000",)),
    ("most-clip", 5, CORA, NOISE, (
        "privacy.clipping_norm=6", "privacy.clipping_norm=1e30", "privacy.epsilon=null",
        "privacy.measurements=report")),
    ("most-delta", 1e-5, CORA, NOISE, (
        "privacy.delta=0.9", "privacy.epsilon=null", "privacy.measurements=report")),
    ("least-clients", 5, SCEM, "", PLAINER),
    ("least-clients", 5, SUMMED, LIES, ()),
    ("least-clients", 10, CORA, None, ("",)),
    ("least-holders", 3, SCEM, "strategy.least_holders=3", ("strategy.least_holders=2",)),
    ("least-holders", 3, CORA, "", ()),
    ("least-holders", 3, GAT, None, (SECURE,)),
    ("differ-by", 3, SCEM, f"{DISTRUSTING} strategy.differ_by=3", ("strategy.differ_by=2",)),
    ("differ-by", 2, SCEM, None, ("", PLAINER[0], f"{DISTRUSTING} strategy.differ_by=1")),
    ("differ-by", 2, SUMMED, None, (LIES,)),
    ("allow-trust", "semi-honest", SCEM, "", (*PLAINER, DISTRUSTING)),
    ("allow-trust", "semi-honest", GAT, SECURE, ()),
    ("allow-trust", "semi-honest,malicious-server", GAT, None, ("",)),
    ("allow-trust", "malicious-server", SCEM, None, ("",)),
    ("allow-trust", "malicious-server", SUMMED, LIES, ("strategy.trust=semi-honest",)),
)  # fmt: skip


@pytest.mark.parametrize(("floor", "value", "name", "permitted", "worse"), HELD)
def test_a_run_below_a_floor_is_refused_by_its_name(
    floor: str, value: Any, name: str, permitted: str | None, worse: tuple[str, ...]
) -> None:
    permits, words = Permits.of({floor: value}), (permitted or "").split()
    if permitted is not None:
        permits.check(load_config(name, words))
    for one in worse:
        run = load_config(name, [*words, *one.split()])
        with pytest.raises(RefusedError, match="node config has") as error:
            permits.check(run)
        assert ("most-delta" if "delta" in one else floor) in str(error.value)
        Permits.of({}).check(run)


@pytest.mark.parametrize("node", [{}, {"state-dir": ":memory:"}], ids=["deployed", "simulated"])
def test_the_server_hears_which_floor_it_is(tmp_path: Path, node: dict[str, Any]) -> None:
    node["most-epsilon"] = 2
    said = asked(app, tmp_path, node=node, config=CORA, overrides="privacy.epsilon=9e6")
    assert "most-epsilon=2" in said


@pytest.mark.parametrize("key,node", [
    *(("most-epsilon", one) for one in ({"most-epsilom": 2}, {"most-epsilon": "2"})),
    *(("most-clip", {"most-clip": wrong}) for wrong in (-1, float("nan"))),
    *(("least-clients", one) for one in ({"least-client": 2}, {"least-clients": 2.5})),
    *(("allow-trust", {"allow-trust": wrong}) for wrong in ("everybody", "")),
    *(("least-holders", one) for one in ({"least-holders": 1}, {"least-holder": 3})),
    *(("most-points", one) for one in ({"most-points": 0}, {"most-point": 9})),
    ("least-noise", {"least-noise": True}), ("data", {"data": 3}),
    *(("differ-by", {"differ-by": wrong}) for wrong in (0, -1, 1.5, "2", True)),
])  # fmt: skip
def test_a_floor_that_cannot_be_read_is_an_error(key: str, node: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=key):
        Permits.of(node)


def test_a_node_names_the_data_that_a_run_may_name(tmp_path: Path) -> None:
    inside, outside = tmp_path / "graphs" / "mine.pt", tmp_path / "other.pt"
    escaping = tmp_path / "graphs" / ".." / "other.pt"
    node = {**NODE, "data": f"Cora,{tmp_path / 'graphs'}"}

    def asked_of(setting: str) -> Any:
        run: Any = {"config": "nfedgnn/cora", "overrides": setting}
        return configured_client(Context(1, 2, node, RecordDict(), run))[0].data.name

    assert [asked_of(f"data.name={name}") for name in ("Cora", inside)] == ["Cora", str(inside)]
    named = ("PubMed", "Airports/usa", outside, escaping, "mine.pt")
    for setting in (*(f"data.name={name}" for name in named), f"data.add={outside}"):
        with pytest.raises(RefusedError, match=setting.partition("=")[0]):
            asked_of(setting)


def test_a_deployed_supernode_fetches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise AssertionError("a SuperNode asked the network")

    monkeypatch.setattr("socket.socket.connect", stop)
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLOWER_GRAPH_DATA", raising=False)
    said = asked(app, tmp_path, config=CORA, overrides="data.name=Airports/usa")
    assert "fetches no data" in said and str(tmp_path) not in said


def test_a_sum_of_too_few_clients_is_not_opened() -> None:
    """A minimum that is too low is refused before keys are made, also by a kept state."""
    request = PrepareRequest(b"run-of-the-sums!", 1, 2, 3, np.array([1, 2]))
    host = SumClient(request.run_id, [0], least=4)
    for one in (host, SumClient.from_bytes(host.to_bytes(), least=4)):
        with pytest.raises(RefusedError, match="least-clients"):
            one.prepare(request)
    assert least_clients({"least-clients": 4}) == 4 and least_clients({}) == 1


@pytest.mark.parametrize("words", [
    f"{SCEM} strategy.alignment=plain strategy.least_holders=3",
    f"{GAT} strategy.alignment=pairs strategy.least_holders=3",
    f"{SCEM} strategy.differ_by=3",
])  # fmt: skip
def test_more_is_asked_for_where_it_counts_alone(words: str) -> None:
    name, *overrides = words.split()
    with pytest.raises(ConfigError, match=overrides[-1].partition("=")[0]):
        load_config(name, overrides)


def test_check_prints_what_a_node_permits(capsys: pytest.CaptureFixture[str]) -> None:
    node = ["--node", 'most-epsilon=2 data="Cora"']
    assert main(["check", *node]) == 0
    said = capsys.readouterr().out
    assert "most-epsilon" in said and "Cora" in said
    assert re.search("least-holders +2", said) and str(1 << 18) in said
    assert main(["check", "nfedgnn/cora", *node]) == 1
    assert "most-epsilon" in capsys.readouterr().out
    assert main(["check", "nfedgnn/cora", "privacy.epsilon=1", *node]) == 0
    assert main(["check", "--node", "nonsense"]) == main(["check"]) == 2
    assert "--node" in capsys.readouterr().err


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
        strategy.reg_weight strategy.resolution strategy.restart strategy.schedule
        strategy.server_average strategy.sketch strategy.steps strategy.tau strategy.temperature
        strategy.threshold strategy.variant strategy.weight_decay
        strategy.evaluate_every strategy.features strategy.label_hops strategy.contrast
        strategy.beta_1 strategy.beta_2 strategy.server_learning_rate strategy.server_optimiser""",
    "how LPGNN's users encode: the budget holds whatever these are": """
        strategy.low strategy.high strategy.sampled strategy.label_epsilon""",
    "a SuperNode's own data: its data folder's manifest has them, and another run is refused": """
        partition. data.active data.categories data.classes data.degree data.feature_noise
        data.features data.homophily data.missing data.no_features data.nodes data.num_features
        data.num_test data.num_val data.ratios data.remove data.signal data.split
        data.split_seed data.train_per_class""",
    "what is written, each on its own machine": """
        checkpoint_every evaluate every keep save track metrics strategy.state""",
    "which method's code: the node config's `methods`": "app",
    "who takes part, and when it ends: sums of too few are `least-clients`' to refuse": """
        patience strategy.min_nodes strategy.most_supernodes strategy.num_malicious
        strategy.participation strategy.robust strategy.timeout strategy.dropout strategy.limit""",
    "under a budget refused; else a masked sum as the others": """
        strategy.model_sharing strategy.hops""",
    "the server's own copy; each SuperNode reads its own": "strategy.registry",
    "the run's to say": "device",
}
FLOORED = """
    privacy.epsilon privacy.form privacy.measurements privacy.delta privacy.clipping_norm rounds
    strategy.name strategy.aggregation strategy.alignment strategy.share strategy.differ_by
    strategy.trust strategy.least_holders data.name data.add data.root"""


def test_every_key_has_a_floor_or_a_reason_and_every_listed_key_is_there() -> None:
    known = {key for app in known_apps() for key in known_keys(method_named(app).schema)}
    section = {key: key.partition(".")[0] + "." for key in known}
    listed = [*FLOORED.split(), *(word for keys in OTHERS.values() for word in keys.split())]
    kinds = {key: (listed.count(key), listed.count(section[key])) for key in known}
    assert {key: found for key, found in kinds.items() if sum(found) != 1} == {}
    assert set(listed) <= known | {*section.values()}


def test_noise_of_the_nodes_own_config_stands_in_for_it() -> None:
    config = load_config(SCEM, [*NOISE.split(), DISTRUSTING, "strategy.differ_by=1"])
    with pytest.raises(RefusedError, match="differ-by"):
        Permits.of({"differ-by": 2}).check(config)
    Permits.of({"differ-by": 2, "most-epsilon": 2}).check(config)


@pytest.mark.parametrize("name", ["fedscem", "fedgls", "nfedgnn"])
def test_nothing_leaves_a_supernode_with_a_key_of_its_own(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, count = ALL[name].load(), ALL[name].supernodes
    strategy: Any = method_of(config).build_strategy(config, None)
    keys = write_keys(max(count, 5), tmp_path)[:count]
    grid = Federation(client_app(config, None), num_supernodes=count, node_config=keys)
    with caplog.at_level(logging.WARNING), pytest.raises(NoClientsError):
        strategy.start(grid, num_rounds=1, timeout=1.0)
    assert grid.exchanged
    assert all(reply.has_error() for _, reply in grid.exchanged)
    assert all(not context.state for context in grid.contexts.values())
    assert "identity-key" in caplog.text


@pytest.mark.parametrize("changes", [{"identity-key": None}, {"identity-key": "/nowhere"}])
def test_settings_that_are_wrong_are_no_reason_to_trust_the_server(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    given = write_keys(5, tmp_path)[0] | changes
    node = {key: value for key, value in given.items() if value is not None}
    reason = asked(client_app(ALL["fedgls"].load(), None), tmp_path, node=node)
    assert "RefusedError" in reason and "/" not in reason
