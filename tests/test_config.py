"""Settings: layers, overrides, and what is refused with which words."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.config.load import (
    describe_config,
    list_configs,
    load_config,
    parse_overrides,
    to_dict,
    to_yaml,
)
from flower_graph.config.schema import known_keys
from flower_graph.errors import ConfigError
from flower_graph.strategies.masked_embedding_averaging.config import FedSCemConfig
from flower_graph.strategies.split_gradient_relay.config import NFedGNNConfig

KEYS = sorted(known_keys(NFedGNNConfig))
PAPER_SETS = {"cora", "citeseer", "pubmed", "chameleon", "squirrel", "wiki-cs"}


def refusal(*overrides: str, config: str = "quickstart") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_shipped_configs_load_and_say_what_they_are_for() -> None:
    names = list_configs()
    assert {"quickstart"} | {f"nfedgnn/{name}" for name in PAPER_SETS} <= set(names)
    for name in names:
        folder, slash, _ = name.partition("/")
        assert load_config(name).app == (folder if slash else "nfedgnn")
        assert describe_config(name)


def test_a_child_config_differs_only_where_it_says_so(tmp_path: Path) -> None:
    text = "defaults: nfedgnn/cora\nmodel: {name: gat, dropout: 0.6}\n"
    child = to_dict(load_config(write(tmp_path, "child.yaml", text)))
    parent = to_dict(load_config("nfedgnn/cora"))
    assert child != parent
    parent["model"].update(name="gat", dropout=0.6)
    assert child == parent


def test_layers_override_each_other_in_order(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "defaults: nfedgnn/cora-averaged\nrounds: 7\nseed: 3\n")
    path = write(tmp_path, "mine.yaml", "defaults: base.yaml\nseed: 4\n")
    config = load_config(path, ["model.hidden=8", "model.hidden=9"])
    assert (config.strategy.average_every, config.rounds, config.seed) == (20, 7, 4)
    assert config.model.hidden == 9


def test_loading_leaves_nothing_behind_for_the_next_load() -> None:
    load_config("quickstart", ["data.ratios=[0.5,0.2,0.2]", "rounds=3"])
    assert load_config("quickstart") == load_config("quickstart")
    assert load_config("quickstart").data.ratios is None


def test_values_are_yaml() -> None:
    config = load_config(
        "quickstart",
        ["data.ratios=[0.6, 0.2, 0.2]", "data.split_index=null", "strategy.weight_decay=1e-3"],
    )
    assert config.data.ratios == [0.6, 0.2, 0.2]
    assert config.data.split_index is None
    assert config.strategy.weight_decay == 0.001
    assert load_config("quickstart", ["data.name=a=b"]).data.name == "a=b"
    assert load_config("quickstart", ["data={name: Cora, split_index: 3}"]).data.split_index == 3


def test_environment_variables_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_GRAPHS", "/graphs")
    assert load_config("quickstart", ["data.root=${oc.env:MY_GRAPHS}"]).data.root == "/graphs"
    assert "NOT_THERE" in refusal("data.root=${oc.env:NOT_THERE}")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("strategy.reg_wieght=10", "strategy.reg_weight"),
        ("reg_weight=10", "strategy.reg_weight"),
        ("Rounds=3", "rounds"),
        ("data..name=x", "data.name"),
        ("model.name.x=1", "model.name"),
        ("model.naem={a: 1}", "model.name"),
    ],
)
def test_unknown_keys_name_the_nearest(override: str, meant: str) -> None:
    key = override.partition("=")[0]
    assert refusal(override).startswith(f"{key}")
    assert refusal(override).endswith(f"unknown key; did you mean {meant}?")


def test_an_ambiguous_key_names_all_that_it_may_mean() -> None:
    assert "data.name or model.name or strategy.name?" in refusal("name=gat")


def test_a_hopeless_key_lists_the_known_ones() -> None:
    assert all(key in refusal("zzz=1") for key in KEYS)
    assert "model.heads" in refusal("model.zzzzzzz=1")
    assert "rounds" not in refusal("model.zzzzzzz=1")


def distance(a: str, b: str) -> int:
    """Levenshtein's distance, row by row."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


@given(
    key=st.sampled_from(KEYS),
    place=st.integers(0, 100),
    letter=st.sampled_from("abcdefghijklmnopqrstuvwxyz_0123456789"),
    kind=st.sampled_from(["insert", "replace", "delete", "swap"]),
)
def test_any_single_slip_is_refused_with_the_right_key(
    key: str, place: int, letter: str, kind: str
) -> None:
    at = place % len(key)
    head, tail = key[:at], key[at + 1 :]
    typed = {
        "insert": head + letter + key[at:],
        "replace": head + letter + tail,
        "delete": head + tail,
        "swap": head + tail[:1] + key[at] + tail[1:],
    }[kind]
    if typed in KEYS or not typed:
        return
    text = refusal(f"{typed}=1")
    assert text.startswith(f"{typed}: unknown key")
    nearest = min(distance(typed, other) for other in KEYS)
    if [other for other in KEYS if distance(typed, other) == nearest] == [key]:
        assert key in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rounds=x", "rounds: 'x' is not a whole number"),
        ("rounds=1.5", "rounds: 1.5 is not a whole number"),
        ("rounds=true", "rounds: true is not a whole number"),
        ("rounds=null", "rounds: null is not a whole number"),
        ("model.dropout=lots", "model.dropout: 'lots' is not a number"),
        ("model.user_bias=maybe", "model.user_bias: 'maybe' is not true or false"),
        ("model.name=[gcn]", "model.name: ['gcn'] is not text"),
        ("data.split_index=q", "data.split_index: 'q' is not a whole number or null"),
        ("data.ratios=[a,b,c]", "data.ratios: ['a', 'b', 'c'] is not a list of numbers or null"),
        ("data.ratios=0.5", "data.ratios: 0.5 is not a list of numbers or null"),
    ],
)
def test_wrong_types_name_key_value_and_type(override: str, words: str) -> None:
    assert refusal(override) == words


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rounds=0", "rounds: 0 is not allowed; it must be at least 1"),
        ("data.ratios=[nan, 0.1, 0.5]", "data.ratios: [nan, 0.1, 0.5] is not allowed; it must be"),
        ("data.nodes=3", "data.nodes: 3 is not allowed; it must be at least 7 (data.classes)"),
        ("data.active=513", "at least 513 (data.active)"),
    ],
)
def test_impossible_values_name_key_value_and_what_is_allowed(override: str, said: str) -> None:
    assert said in refusal(override)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("model.name=GAT", "gat"),
        ("data.split=geom_gcn", "geom-gcn"),
        ("strategy.average_over=holder", "holders"),
        ("strategy.name=split-gradient-rely", "split-gradient-relay"),
        ("app=nfedgn", "nfedgnn"),
        ("app=fedsem", "fedscem"),
        ("device=cuda:x", "cuda"),
    ],
)
def test_unknown_choices_name_the_nearest(override: str, meant: str) -> None:
    key, _, value = override.partition("=")
    text = refusal(override)
    assert text.startswith(f"{key}: {value!r} is not one of ")
    assert text.endswith(f"did you mean {meant}?")


def test_edges_of_what_is_allowed_are_allowed() -> None:
    load_config(
        "quickstart",
        [
            "rounds=1",
            "model.dropout=0",
            "strategy.reg_weight=0",
            "strategy.participation=1",
            "data.ratios=[0.48, 0.32, 0.2]",
            "data.homophily=1",
            "device=cuda:3",
            "data.active=512",
        ],
    )


def test_averaging_over_all_needs_all() -> None:
    over_all = ["strategy.average_over=all", "strategy.participation=0.5"]
    load_config("quickstart", over_all)  # harmless: nothing is averaged
    text = refusal(*over_all, "strategy.average_every=2")
    assert "strategy.participation: 0.5" in text and "strategy.average_over=holders" in text


def test_validate_also_guards_settings_built_in_code() -> None:
    for config in (NFedGNNConfig(), FedSCemConfig()):
        config.validate()
        config.strategy.learning_rate = math.nan
        with pytest.raises(ConfigError, match=r"strategy\.learning_rate: nan"):
            config.validate()


@pytest.mark.parametrize("override", ["rounds", "rounds=", "=3", "=", "", "rounds= "])
def test_malformed_overrides(override: str) -> None:
    assert f"override {override!r}: write key=value" in refusal(override)


@pytest.mark.parametrize("override", ["rounds=[1", "data.name=${x", "data.name={a"])
def test_overrides_that_are_not_yaml(override: str) -> None:
    assert f"override {override!r}: malformed YAML" in refusal(override)


@pytest.mark.parametrize("override", ["data=3", "data=null", "model={}"])
def test_a_section_is_no_setting(override: str) -> None:
    key = override.partition("=")[0]
    assert refusal(override).startswith(f"{key}: a section, not a setting; set {key}.name")


def test_unknown_configs_name_the_nearest() -> None:
    assert "did you mean nfedgnn/cora-averaged?" in refusal(config="nfedgnn/cora-average")
    known = "fedgls/cora or fedgta/cora or fedpub/cora or fedscem/cora or nfedgnn/cora"
    assert f"did you mean {known}?" in refusal(config="cora")
    assert "there are fedgls/citeseer" in refusal(config="zzzzzzzz")
    assert "unknown" in refusal(config="../conf/quickstart")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds: [1\n", "malformed YAML"),
        ("a: 1\na: 2\n", "malformed YAML"),
        ("- 1\n", "a list; a config has keys and values"),
        ("just words\n", "just words: unknown key"),
        ("data:\n", "data: a section"),
        ("strategy:\n  reg_wieght: 1\n", "strategy.reg_wieght: unknown key"),
        ("rounds: many\n", "rounds: 'many' is not a whole number"),
        ("defaults: [a, b]\n", "defaults: ['a', 'b'] is not the name of one config"),
        ("defaults: nfedgnn/coar\n", "did you mean nfedgnn/cora"),
        ("defaults: nowhere.yaml\n", "No such file"),
        ("defaults: mine.yaml\n", "is a parent of itself"),
    ],
)
def test_bad_files_name_the_fault_and_the_file(tmp_path: Path, text: str, words: str) -> None:
    said = refusal(config=write(tmp_path, "mine.yaml", text))
    assert words in said
    assert "mine.yaml" in said or "nowhere.yaml" in said or "nfedgnn/coar" in said


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refusal(config=str(tmp_path / "none.yaml"))
    (tmp_path / "folder.yaml").mkdir()
    assert "Is a directory" in refusal(config=str(tmp_path / "folder.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in refusal(config=str(tmp_path / "binary.yaml"))


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "mine.yaml", "# nothing\n")) == NFedGNNConfig()


finite = st.floats(1e-6, 1e6)
settings_given = st.fixed_dictionaries(
    {
        "rounds": st.integers(1, 10**9),
        "seed": st.integers(0, 2**63 - 1),
        "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:1"]),
        "strategy.reg_weight": finite,
        "strategy.learning_rate": finite,
        "model.user_bias": st.booleans(),
        "data.ratios": st.none() | st.just([0.5, 0.25, 0.25]),
    }
)


@given(settings_given)
def test_overrides_and_yaml_come_back_as_they_were_given(given_values: dict[str, object]) -> None:
    overrides = [f"{key}={json.dumps(value)}" for key, value in given_values.items()]
    config = load_config("quickstart", parse_overrides(shlex.join(overrides)))
    flat = to_dict(config)
    for key, value in given_values.items():
        section, _, name = key.rpartition(".")
        found = (flat[section] if section else flat)[name]
        # Booleans are equal to 0 and 1: types are compared too.
        assert found == value and type(found) is type(value)


def test_resolved_yaml_loads_to_the_same_settings(tmp_path: Path) -> None:
    of_each_app = {name.partition("/")[0]: name for name in list_configs()}
    for name in of_each_app.values():
        section = "gat" if name.startswith("ppfl/") else "strategy"
        small = f"{section}.weight_decay=1e-7"
        config = load_config(name, ["data.ratios=[0.5,0.25,0.25]", small])
        assert load_config(write(tmp_path, "resolved.yaml", to_yaml(config))) == config


def test_overrides_are_split_as_a_shell_does() -> None:
    assert parse_overrides("model.name=gat data.name='my graph.pt'") == [
        "model.name=gat",
        "data.name=my graph.pt",
    ]
    assert parse_overrides("  ") == []
    with pytest.raises(ConfigError, match="No closing quotation"):
        parse_overrides("data.name='x")
