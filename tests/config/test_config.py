"""Settings: layers, overrides, every method's schema, and what is refused with which words."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from flower_graph.config.common import DataConfig, RunConfig, StrategySection
from flower_graph.config.rules import show
from flower_graph.config.schema import section, settings_of
from flower_graph.errors import ConfigError
from flower_graph.method.load import (
    describe_config,
    list_configs,
    load_config,
    parse_overrides,
    title_of,
    to_dict,
    to_yaml,
)
from flower_graph.method.registry import known_apps, schema_of
from flower_graph.strategies.nfedgnn.config import NFedGNNConfig


def refusal(*overrides: str, config: str = "quickstart") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_the_papers_form_is_beside_quickstart():
    quick, paper = load_config("quickstart"), load_config("nfedgnn/cora-linqs")
    assert quick.data == paper.data == load_config("nfedgnn/cora", ["data.name=cora-linqs"]).data
    assert (quick.strategy.share, paper.strategy.share) == ("summed", "own")


def test_settings_come_with_a_task_unless_the_user_says_otherwise(tmp_path):
    def found(config, *overrides):
        read = load_config(config, overrides)
        return read.model.hidden, read.strategy.learning_rate

    shipped = "nfedgnn/cora-summed"
    assert found(shipped) == (16, 0.03) and found(shipped, "task=links") == (64, 0.01)
    assert found(shipped, "task=links", "task=nodes") == (16, 0.03)
    for words in (["model.hidden=8", "task=links"], ["task=links", "model.hidden=8"]):
        assert found(shipped, *words) == (8, 0.01)
    mine = f"defaults: {shipped}\ntask: links\nstrategy: {{learning_rate: 0.2}}\n"
    file = write(tmp_path, "mine.yaml", mine)
    assert found(file) == (64, 0.2) and found(file, "rounds=3", "model.hidden=8") == (8, 0.2)
    again = write(tmp_path, "whole.yaml", to_yaml(load_config(file, ["model.hidden=8"])))
    assert found(again) == (8, 0.2)


def test_shipped_configs_load_and_say_what_they_are_for():
    names = list_configs()
    assert {"quickstart", "nfedgnn/cora", "nfedgnn/squirrel-filtered"} <= set(names)
    for name in names:
        folder, slash, _ = name.partition("/")
        assert load_config(name).app == (folder if slash else "nfedgnn")
        assert describe_config(name).endswith("."), "a whole sentence"


def test_layers_override_each_other_in_order(tmp_path):
    text = "defaults: nfedgnn/cora\nmodel: {name: gat, dropout: 0.6}\n"
    parent = to_dict(load_config("nfedgnn/cora"))
    parent["model"].update(name="gat", dropout=0.6)
    assert to_dict(load_config(write(tmp_path, "child.yaml", text))) == parent
    write(tmp_path, "base.yaml", "defaults: nfedgnn/cora-averaged\nrounds: 7\nseed: 3\n")
    path = write(tmp_path, "mine.yaml", "defaults: base.yaml\nseed: 4\n")
    config = load_config(path, ["model.hidden=8", "model.hidden=9"])
    assert (config.strategy.average_every, config.rounds, config.seed) == (20, 7, 4)
    assert config.model.hidden == 9


def test_values_are_yaml_and_may_name_environment_variables(monkeypatch):
    assert load_config("quickstart", ["data.name=a=b"]).data.name == "a=b"
    assert load_config("quickstart", ["data={name: Cora, split_seed: 3}"]).data.split_seed == 3
    monkeypatch.setenv("MY_GRAPHS", "/graphs")
    assert load_config("quickstart", ["data.root=${oc.env:MY_GRAPHS}"]).data.root == "/graphs"
    assert "NOT_THERE" in refusal("data.root=${oc.env:NOT_THERE}")
    assert "model.nme" in refusal("data.name=${model.nme}")


HINTS = {
    "strategy.reg_wieght=10": "strategy.reg_weight",
    "reg_weight=10": "strategy.reg_weight",
    "data..name=x": "data.name",
    "model.name.x=1": "model.name",
    "model.naem={a: 1}": "model.name",
    "name=gat": "data.name or model.name or strategy.name",
    "model.name=GAT": "gat",
    "data.split=geom_gcn": "geom-gcn",
    "app=fedsem": "fedscem",
    "device=cuda:x": "cuda",
}
WANTED = {
    "rounds=x": "a whole number",
    "rounds=true": "a whole number",
    "rounds=null": "a whole number",
    "model.user_bias=maybe": "true or false",
    "model.name=[gcn]": "text",
    "data.split_seed=q": "a whole number or null",
    "data.ratios=[a,b,c]": "a list of numbers or null",
}


def test_a_refused_override_names_its_key_and_the_nearest_or_the_type():
    ends = {override: f"did you mean {hint}?" for override, hint in HINTS.items()} | WANTED
    for override, end in ends.items():
        said = refusal(override)
        assert said.startswith(override.partition("=")[0]) and said.endswith(end), said
    assert refusal("data.split_index=1").startswith("data.split_index is gone: ")
    for app in ("fedsgd", "3", "[nfedgnn]", "null"):
        assert refusal(f"app={app}").startswith("app: ")


def test_malformed_overrides_and_unknown_configs():
    for override in ("rounds", "rounds=", "=3", "", "rounds=[1", "data.name=${x"):
        assert refusal(override).startswith(f"override {override!r}: ")
    found = parse_overrides("model.name=gat data.name='my graph.pt'")
    assert found == ["model.name=gat", "data.name=my graph.pt"] and parse_overrides("  ") == []
    with pytest.raises(ConfigError, match="No closing quotation"):
        parse_overrides("data.name='x")
    for override in ("data=3", "data=null", "model={}"):
        assert refusal(override).startswith(f"{override.partition('=')[0]}: a section")
    for name, hint in {
        "nfedgnn/cora-average": "mean nfedgnn/cora-averaged?",
        "fedgta/cora-linqs-gat": "mean fedgta",  # of the same method
        "ditto": "ditto/citeseer",
        "cora": "ditto/cora",
        "zzzzzzzz": "flower-graph list",
    }.items():
        assert hint in refusal(config=name)
    assert "unknown" in refusal(config="../conf/quickstart")


# A file's text, and what is named besides the file
BAD: dict[str, tuple[str, ...]] = {
    "": ("rounds: [1", "a: 1\na: 2", "data: *base", "rounds: 1\n---\nrounds: 2", "5", "- 1"),
    "1: ": ("1: 2",),
    "data: a section": ("data:",),
    "rounds": ("rounds: {a: 1}", "rounds: many"),
    "strategy.reg_wieght: ": ("strategy:\n  reg_wieght: 1",),
    "partition.clients: ": ("app: nfedgnn\npartition: {clients: 3}",),
    "defaults: ['a', 'b']": ("defaults: [a, b]",),
    "nfedgnn/cora": ("defaults: nfedgnn/coar",),
    "nowhere.yaml": ("defaults: nowhere.yaml",),
    "defaults: ": ("defaults: mine.yaml",),
}


def test_bad_files_name_the_fault_and_the_file(tmp_path):
    file = tmp_path / "mine.yaml"
    assert "mine.yaml" in refusal(config=str(file))  # it is not there
    file.write_bytes(b"\xff\xfe\x00")
    assert "mine.yaml" in refusal(config=str(file))
    for words, text in ((words, text) for words, texts in BAD.items() for text in texts):
        said = refusal(config=write(tmp_path, "mine.yaml", f"{text}\n"))
        names = ("nowhere.yaml", "nfedgnn/coar") if words.startswith("n") else ("mine.yaml",)
        assert words in said and any(name in said for name in names), said


def test_resolved_yaml_loads_to_the_same_settings(tmp_path):
    assert load_config(write(tmp_path, "mine.yaml", "# nothing\n")) == NFedGNNConfig()
    for app in known_apps():
        name = next(one for one in list_configs() if one.startswith(f"{app}/"))
        small = f"{'gat' if app == 'ppfl' else 'strategy'}.weight_decay=1e-7"
        config = load_config(name, ["data.ratios=[0.5,0.25,0.25]", small])
        assert load_config(write(tmp_path, "resolved.yaml", to_yaml(config))) == config


# Every method's schema ---------------------------------------------------------------------------

NUMBERS: list[Any] = [-1, 0, 1, 2, 10**6, 2**63]
# What a rule may refuse, by the type that the setting wants
TRIED: dict[str, list[Any]] = {
    "a whole number": NUMBERS,
    "a number": [*map(float, NUMBERS), 0.5, math.nan, math.inf],
    "text": ["", "nonsense"],
    "a list of words": [["nonsense"]],
    "text or a list of words": ["nonsense", [], ["gcn", "nonsense"]],
    "a list of numbers": [
        [0.6, 0.4],
        [0.6, 0.4, 0.0],
        [0.6, 0.3, 0.2],
        [-0.1, 0.5, 0.5],
        [math.nan, 0.1, 0.1],
    ],
}
# Their limits are those of other settings, and are refused where all of them are known.
WITHOUT_RULES = {"data.nodes", "data.num_features", "strategy.resolution"}


@pytest.mark.parametrize("app", known_apps())
def test_every_rule_names_key_value_and_what_is_allowed(app):
    for one in settings_of(schema_of(app)):
        kind = one.wanted.removesuffix(" or null")
        if kind.endswith("number") and one.key not in WITHOUT_RULES:
            assert one.rules, f"{one.key}: any number is allowed"
        refusing = set()
        for value in TRIED[kind] if one.rules else ():
            broken = next((rule for rule in one.rules if not rule.admits(value)), None)
            if broken is None:
                continue
            refusing.add(broken)
            config = schema_of(app)()
            place, _, name = one.key.rpartition(".")
            setattr(getattr(config, place) if place else config, name, value)
            with pytest.raises(ConfigError) as caught:
                config.validate()
            said = str(caught.value)
            assert said.startswith(f"{one.key}: {show(value)} is not ")
            assert broken.words in said
        assert refusing == set(one.rules), f"{one.key}: a rule refuses nothing"


@pytest.mark.parametrize("app", known_apps())
def test_every_schema_starts_with_the_same_keys(app):
    common = "app seed rounds device checkpoint_every patience metrics evaluate save keep every"
    assert [*to_dict(schema_of(app)())][:13] == [*common.split(), "track", "data"]


def test_the_app_decides_which_schema_holds(tmp_path):
    own = write(tmp_path, "own.yaml", "seed: 4\n")
    for words, app, rounds in (
        ([], "nfedgnn", 200),
        (["strategy.tau=2", "app=fedscem", "partition.hops=1"], "fedscem", 400),
        (["graph.tau=2", "app=fedgls", "partition.clients=3"], "fedgls", 100),
        (["gat.beta=2", "app=ppfl", "model.name=gat"], "ppfl", 10),
        (["app=fedscem", "app=nfedgnn"], "nfedgnn", 200),
    ):
        config = load_config(own, words)
        assert type(config) is schema_of(app)
        assert (config.app, config.seed, config.rounds) == (app, 4, rounds)


LIES, SECURE = "strategy.trust=malicious-server", "strategy.alignment=secure"


@pytest.mark.parametrize(
    ("config", "overrides", "said"),
    [
        ("nfedgnn/cora-linqs", "data.nodes=3", "data.nodes"),
        ("nfedgnn/cora-linqs", "data.active=513", "data.num_features"),
        ("nfedgnn/cora-linqs", "task=links data.remove=[3]", "task: 'links'"),
        ("nfedgnn/cora-linqs", "strategy.average_every=2", "strategy.average_every: 2"),
        ("nfedgnn/cora-linqs", "strategy.average_over=all", "strategy.average_over"),
        ("nfedgnn/cora-linqs", "strategy.share=averaged", "strategy.average_every: 0"),
        ("nfedgnn/cora-linqs", "strategy.sketch=64", "strategy.sketch: 64"),
        ("nfedgnn/cora-linqs", "strategy.aggregation=masked", "strategy.aggregation"),
        ("nfedgnn/cora-linqs", "strategy.trust=malicious-server", "strategy.share: own"),
        ("ppfl/cora-linqs-gat", "strategy.trust=malicious-server", "strategy.alignment: pairs"),
        ("ppfl/cora-linqs-gat", f"{LIES} {SECURE} strategy.name=local", "strategy.name: local"),
        ("ppfl/cora-linqs-gat", f"{SECURE} strategy.registry=a.json", "strategy.registry: a.json"),
        ("nfedgnn/cora-averaged", "strategy.state=file", "strategy.state"),
        ("nfedgnn/cora-summed", "strategy.newcomers_alone=2", "strategy.newcomers_alone: 2"),
        ("nfedgnn/cora-summed", "privacy.epsilon=5", "strategy.share=summed"),
        ("nfedgnn/cora-summed", "strategy.trust=malicious-server", "strategy.aggregation: plain"),
        ("fedscem/cora", "partition.clients=1", "partition.clients"),
        ("fedscem/cora", f"{LIES} strategy.aggregation=plain", "strategy.aggregation: plain"),
        ("fedscem/cora", f"{LIES} strategy.alignment=plain", "strategy.alignment: plain"),
        ("fedscem/cora", f"{LIES} strategy.model_sharing=fedavg", "strategy.model_sharing: fedavg"),
        ("fedscem/cora", f"{LIES} strategy.participation=0.5", "strategy.participation: 0.5"),
        ("fedscem/cora", f"{LIES} strategy.name=fedavg", "strategy.name: fedavg"),
        ("fedscem/cora", f"{LIES} partition.clients=4", "partition.clients: 4"),
        ("fedscem/cora", "strategy.resolution=0.0", "strategy.resolution"),
        ("fedscem/cora", "strategy.resolution=33.0", "strategy.resolution"),
        ("nfedgnn/cora", "every=5 save=none", "every: 5"),
        ("ppfl/cora-gat", "partition.private_share=0.2", "0.15"),
        ("ppfl/cora-gat", "partition.public_share=0.5", "0.125"),
        ("ppfl/cora-gat", "gat.heads=3", "model.dimension: 16"),
        ("ppfl/cora-gat", "privacy.epsilon=5 strategy.name=local", "privacy.epsilon: 5"),
        ("ppfl/cora-gat", "privacy.epsilon=5 strategy.alignment=secure", "privacy.epsilon"),
        ("ppfl/cora-gat", f"strategy.absent=last {SECURE}", "strategy.absent: last"),
    ],
)
def test_settings_that_do_not_go_together(config, overrides, said):
    assert said in refusal(*overrides.split(), config=config)


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("nfedgnn/cora-linqs", "model.dropout=0 data.ratios=[0.48,0.32,0.2] data.active=512"),
        ("nfedgnn/cora-linqs", "device=cuda:3 strategy.share=summed strategy.participation=0.5"),
        ("fedscem/cora", "partition.clients=2 partition.ratios=[1,0,0] strategy.resolution=32"),
        ("fedscem/cora", "partition.clients=1 strategy.aggregation=plain"),
        ("fedscem/cora", "partition.clients=1 strategy.name=self-training checkpoint_every=1"),
        ("fedgls/cora", "graph.graphless_ratio=0 partition.clients=1 strategy.weight_decay=0"),
    ],
)
def test_edges_of_what_is_allowed_are_allowed(config, overrides):
    load_config(config, overrides.split())


# A stranger's schema -----------------------------------------------------------------------------


@dataclass
class Mine(RunConfig):
    rounds: int = 7
    data: DataConfig = section(DataConfig, split="random", ratios=[0.5, 0.2, 0.3])
    strategy: StrategySection = section(StrategySection, name="mine")


def test_defaults_hold_and_are_nobody_elses():
    first, second = Mine(), Mine()
    first.validate()
    first.metrics.append("macro-f1")
    first.data.ratios.append(0.0)
    assert second == Mine() and second.metrics == ["accuracy"] and second.rounds == 7
    assert OmegaConf.to_object(OmegaConf.structured(Mine)) == second


def test_paths_of_data_in_a_file_start_from_its_folder(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    for name in ("graph", "Cora"):
        (tmp_path / "mine" / name).touch()
    monkeypatch.chdir(tmp_path)
    here = f"{tmp_path}/"
    for name, full in {
        "graph.pt": f"{here}mine/graph.pt",
        "../clients/": f"{here}clients/",
        "./graph": f"{here}mine/graph",  # no ending: only since it is there
        **{name: name for name in ("other/graph", "Cora", "Coauthor/CS", "/data/graph.pt")},
    }.items():
        Path("mine/run.yaml").write_text(f"data: {{name: {name}, root: raw}}\n", encoding="utf-8")
        config = load_config("mine/run.yaml")
        assert (config.data.name, config.data.root) == (full, f"{here}mine/raw")
        # What a run writes down holds from anywhere: `--resume` reads it in another folder.
        Path("config.yaml").write_text(to_yaml(config), encoding="utf-8")
        with monkeypatch.context() as elsewhere:
            elsewhere.chdir(tmp_path / "mine")
            assert load_config("../config.yaml") == config
    # Overrides start from the working directory, and so does what a parent says from the parent.
    assert load_config("mine/run.yaml", ["data.name=g.pt"]).data.name == str(tmp_path / "g.pt")
    Path("run.yaml").write_text("defaults: mine/run.yaml\n", encoding="utf-8")
    assert load_config("run.yaml").data.root == str(tmp_path / "mine" / "raw")


def test_a_titles_control_characters_reach_no_terminal(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("# run of cora\x1b[2J\x07\nseed: 1\n", encoding="utf-8")
    title = title_of(str(file))
    assert title.startswith("cora") and title.isprintable()
