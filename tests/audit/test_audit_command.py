"""``flower-graph audit``: runs, files, refusals."""

import json
from pathlib import Path

import pytest
from audit_helpers import small_yaml

from flower_graph.apps.cli import audit
from flower_graph.apps.cli import main as cli
from flower_graph.apps.cli.audit import write_index
from flower_graph.apps.run import client_app
from flower_graph.audit.attacks import RecordingGrid, array_of, findings_of, page, ranking
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_named, method_of
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid


def test_an_audit_writes_its_figures_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "audits" / "fedgls"
    words = ["audit", small_yaml(tmp_path, "fedgls"), "--seeds", "0,1", "--epsilon", "5"]
    assert cli.main([*words, "--out", str(out)]) == 0
    record = json.loads((out / "audit.json").read_text())
    assert (record["app"], record["rounds"], record["seeds"]) == ("fedgls", 3, [0, 1])
    assert [one["name"] for one in record["settings"]] == ["no noise", "noise, epsilon 5"]
    first = record["findings"][0]
    assert first["attack"].startswith("which features") and first["setting"] == "no noise"
    assert (first["values"], first["beats-chance"]) == ([1.0, 1.0], True)
    table = (out / "audit.md").read_text()
    assert table.count("\n| ") == 1 + len(record["findings"])
    assert "1.000 ± 0.000" in table and table in capsys.readouterr().out
    assert (out / "audit.png").stat().st_size > 1000
    assert cli.main(["audit", "--page", str(out.parent)]) == 0
    index = (out.parent / "README.md").read_text()
    notes = method_named("fedgls").audit().notes
    assert "(fedgls/audit.png)" in index and page(record, notes, level=2) in index


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("nfedgnn/cora-linqs --epsilon 0", "--epsilon 0"),
        ("nfedgnn/cora-linqs --epsilon ten", "--epsilon ten"),
        ("nfedgnn/cora-linqs --rounds 1", "--rounds 1"),
        ("", "CONFIG"),
        ("nfedgnn/cora-linqs --page here", "--page here"),
        ("--page nowhere", "audit.json"),
        ("fedgls/cora-linqs strategy.name=fedproto", "strategy.name: fedproto"),
        ("ppfl/cora-linqs-gat strategy.name=local", "strategy.name: local"),
        ("fedgls/cora-linqs privacy.epsilon=1 privacy.form=central", "privacy.form: central"),
    ],
)
def test_bad_input_is_named(words: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", *words.split()]) == 2
    assert key in capsys.readouterr().err


def labels(name: str, *overrides: str, alone: bool = False) -> list[str]:
    found = audit.settings_of(name, overrides, rounds=None, epsilons=[10.0], alone=alone)
    return [label for label, _ in found]


NOISE, FORMS = "noise, epsilon 10", ["psi, masked sum", "psi, plain sum", "plain, masked sum"]
SUMMED = ["summed, plain sums, no noise", "summed, masked sums, no noise"]
AVERAGED = "strategy.share=averaged strategy.average_every=5"


@pytest.mark.parametrize(
    ("words", "forms"),
    [
        ("nfedgnn/cora-linqs", ["no noise", NOISE]),
        ("nfedgnn/cora-linqs privacy.epsilon=2", ["noise, epsilon 2", "no noise", NOISE]),
        (f"nfedgnn/cora-linqs {AVERAGED}", ["averaged, no noise"]),
        ("nfedgnn/cora-linqs strategy.share=summed", [*SUMMED, "no noise", "averaged, no noise"]),
        ("ppfl/cora-linqs-gat", ["no noise", NOISE, "secure sum"]),
        ("ppfl/cora-linqs-gat strategy.alignment=secure", ["secure sum", "no noise", NOISE]),
        ("fedscem/cora-linqs", FORMS),
    ],
)
def test_every_method_has_its_counterparts(words: str, forms: list[str]) -> None:
    assert labels(*words.split()) == forms
    assert labels(*words.split(), alone=True) == forms[:1]


def test_as_many_rounds_are_recorded_as_are_asked_for_or_needed() -> None:
    for count, words, wanted in ((None, [], 10), (None, ["rounds=4"], 4), (33, [], 33)):
        how = {"rounds": count, "epsilons": [], "alone": True}
        assert audit.settings_of("nfedgnn/cora-linqs", words, **how)[0][1].rounds == wanted


def test_the_recording_grid_changes_nothing_and_keeps_all_messages(tmp_path: Path) -> None:
    config = load_config(small_yaml(tmp_path, "nfedgnn"), [])
    method, losses = method_of(config), []
    for kind in (InProcessGrid, RecordingGrid):
        grid = kind(client_app(config, None), num_supernodes=2, seed=0)
        reports = list[RoundReport]()
        method.build_strategy(config, None).start(grid, num_rounds=3, on_round=reports.append)
        losses.append([one.loss for one in reports])
    assert losses[0] == losses[1]
    assert isinstance(grid, RecordingGrid)
    kept = [one.kind for one in grid.exchanges]
    assert {one.place for one in grid.exchanges} == {0, 1}
    assert (kept.count("query"), kept.count("train"), kept.count("train.finish")) == (2, 6, 2)
    last = [one for one in grid.exchanges if one.kind == "train"][-1]
    assert array_of(last.reply, "arrays", "relay").shape == (45, 8)
    with pytest.raises(ValueError, match="arrays/other"):
        array_of(last.reply, "arrays", "other")


def test_seeds_are_joined_attack_by_attack() -> None:
    first, second = ranking("a", [2, 1], [True, False]), ranking("a", [1, 2], [True, False])
    (row,) = findings_of("s", [[first], [second]])
    assert (row["mean"], row["values"], row["n"]) == (0.5, [1.0, 0.0], 4)
    assert row["std"] == pytest.approx(0.5**0.5)
    assert not row["beats-chance"]
    with pytest.raises(ValueError, match="attacks"):
        findings_of("s", [[first], [ranking("b", [2, 1], [True, False])]])


def test_the_page_of_results_is_what_the_command_writes(tmp_path: Path) -> None:
    results = Path(__file__).resolve().parents[2] / "docs" / "results" / "audit"
    copy = tmp_path / "audit"
    for path in results.glob("*/audit.json"):
        (copy / path.parent.name).mkdir(parents=True)
        (copy / path.parent.name / "audit.json").write_text(path.read_text())
    assert write_index(copy).read_text() == (results / "README.md").read_text()
