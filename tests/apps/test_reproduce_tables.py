"""What holds for every paper's tables, and for a table of a stranger's."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from app_helpers import InlinePool
from table_helpers import asked_of, hash_of, made_up

from flower_graph.apps.reproduce import command, experiments
from flower_graph.apps.reproduce.command import main, write_page
from flower_graph.apps.reproduce.experiments import Run, left_to_run
from flower_graph.apps.reproduce.page import make_page
from flower_graph.apps.reproduce.rows import make_rows, missing_runs
from flower_graph.apps.reproduce.table import read_table, tables
from flower_graph.config.common import RunConfig
from flower_graph.config.load import load_config
from flower_graph.config.sources import list_configs
from flower_graph.errors import ConfigError, DataError
from flower_graph.report.rounds import RoundReport

FROZEN = json.loads((Path(__file__).parents[1] / "frozen" / "reproduce.json").read_text())
every_table = pytest.mark.parametrize("name", list(tables()))


def test_tables_are_no_runs() -> None:
    assert not [name for name in list_configs() if name.startswith("reproduce")]


@every_table
def test_runs_are_kept_under_the_names_of_old(name: str) -> None:
    """Folders of kept runs are found again: names, settings, seeds and rounds are as frozen."""
    asked = asked_of(name, seeds=None, rounds=None)
    by_experiment: dict[Any, list[Run]] = {}
    for run in asked.runs():
        by_experiment.setdefault(run.experiment, []).append(run)
    now = {hash_of(runs): runs for runs in by_experiment.values()}
    assert now.keys() == FROZEN[name].keys()
    for key, (first, *more) in now.items():
        frozen, settings = FROZEN[name][key], experiments.settings_of(experiments._config(first))
        assert (len(more) + 1, first.rounds) == (frozen["runs"], frozen["rounds"])
        assert {k: settings[k] for k in frozen["settings"]} == frozen["settings"]


@every_table
def test_every_run_once_whole_seeds_first(name: str) -> None:
    asked = asked_of(name)
    runs = asked.runs()
    assert len(runs) == len(set(runs))
    for stage in asked.stages():
        assert len({run.seed for run in stage}) == 1
    assert {run.experiment.config for run in runs} <= {*list_configs()}
    longer = asked_of(name, rounds=3000)
    assert longer.estimate(longer.runs()) > 5 * asked.estimate(runs) > 0


@every_table
def test_the_papers_figures_are_beside_ours(name: str, tmp_path: Path) -> None:
    asked = asked_of(name)
    runs = made_up(asked)
    rows = make_rows(asked, runs)
    assert len({json.dumps({k: r[k] for k in r if k not in ("values",)}) for r in rows}) == len(
        rows
    )
    page = make_page(asked, runs, rows, ["Elsewhere: not there"])
    assert missing_runs(asked, runs) == []
    assert "- Elsewhere: not there" in page and "nan" not in page
    with_paper = [r for r in rows if r["paper"] is not None]
    assert with_paper
    for r in rows:
        assert r["values"] and math.isfinite(r["mean"])
        assert r["settings"]["config"] in list_configs()
    for above, line in pairwise(page.splitlines()):
        if above.startswith("|") and line.startswith("|"):
            assert above.count("|") == line.count("|")  # every line has all columns of its table


@every_table
def test_rows_with_fewer_runs_than_seeds_are_named(name: str) -> None:
    asked = asked_of(name)
    runs = made_up(asked)
    group = next(g for g in asked.groups() if len(g.seeds) == 2 and len(g.experiments) == 1)
    del runs[group.experiments[0]][1]
    missing = missing_runs(asked, runs)
    assert f"{group.words}: 1 of 2 runs" in missing
    rows = make_rows(asked, runs)
    assert any(r["seeds"] == [0] for r in rows)
    assert f"- {group.words}: 1 of 2 runs" in make_page(asked, runs, rows, missing)
    assert make_rows(asked, {}) == []
    empty = make_page(asked, {}, [], missing_runs(asked, {}))
    assert "## Table" not in empty and f"- {group.words}: 0 of 2 runs" in empty


@every_table
def test_what_is_unknown_is_refused(name: str, tmp_path: Path) -> None:
    table = read_table(name)
    first = next(iter(table.data))
    for only, said in (
        ({"dat": ["Cora"]}, "dat"),
        ({"data": ["Coral"]}, f"data=Coral: unknown; allowed are {first}"),
        ({"table": ["table-9"]}, "table=table-9: unknown; allowed are"),
    ):
        with pytest.raises(ConfigError, match=said):
            main(name, tmp_path / "out", only=only, seeds=[0], rounds=1)
    assert not (tmp_path / "out").exists()


def test_an_unknown_paper_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fedgl' is unknown; did you mean 'fedgls'"):
        main("fedgl", tmp_path, only={}, seeds=None, rounds=None)
    with pytest.raises(ConfigError, match=f"there are {', '.join(tables())}"):
        main("somebody-elses", tmp_path, only={}, seeds=None, rounds=None)


# Runs with a stub in place of training -----------------------------------------------------------


def report(number: int, val: float, test: float) -> RoundReport:
    made = RoundReport(number, 1.0, 1.0, 0.0, 0.9, val, test, 1, 1)
    made.structure = {"precision": 0.1 * number, "recall": float("nan")}
    return made


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Have runs take no time, and break with seed 7; the configs that were run."""
    ran: list[RunConfig] = []

    def simulate(config: RunConfig) -> tuple[list[RoundReport], dict[str, Any]]:
        if config.seed == 7:
            raise RuntimeError("the run broke")
        ran.append(config)
        return [report(1, 0.5, 0.6), report(2, 0.7, 0.8), report(3, 0.6, 0.9)], {}

    monkeypatch.setattr(experiments, "simulate_whole", simulate)
    monkeypatch.setattr(experiments, "ProcessPoolExecutor", InlinePool)
    monkeypatch.setattr(command, "cached_data", lambda config: None)
    return ran


OWN = {
    "title": "A table of my own",
    "config": "fedgls/{data!l}",
    "only": ["data", "method", "table"],
    "seeds": [0, 1],
    "data": {"Cora": {"seconds": 0.01}, "CiteSeer": {}},
    "methods": {
        "mine": {"settings": ["strategy.name=structure-fedavg"]},
        "other": {"settings": ["strategy.name=fed-gnn"]},
    },
    "tables": {
        "one": [
            {
                "table": "Table one",
                "rows": [
                    {"metric": "test-accuracy-at-best-val", "paper": True},
                    {"metric": "gain", "of": "test-accuracy-last", "over": "other"},
                    "precision-last",
                ],
                "paper": {"Cora": {"mine": 0.75}},
            }
        ],
    },
    "page": [
        {"text": "Seeds {seeds}."},
        {
            "heading": "{data}",
            "for": ["data"],
            "rows": {"table": "Table one"},
            "each": ["method"],
            "columns": [
                ["method", "{method}"],
                ["ours", "accuracy", "test-accuracy-at-best-val"],
                ["paper", "paper:.2f", "test-accuracy-at-best-val"],
                ["gain", "points", "gain"],
                ["n", "seeds", "test-accuracy-at-best-val"],
            ],
        },
    ],
}


@pytest.fixture
def own_table(tmp_path: Path) -> str:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(OWN, sort_keys=False))
    return str(path)


def test_a_table_of_ones_own(own_table: str, tmp_path: Path, simulated: list[RunConfig]) -> None:
    out, only = tmp_path / "out", {"data": ["Cora"]}
    main(own_table, out, only=only, seeds=None, rounds=3)
    assert [config.seed for config in simulated] == [0, 0, 1, 1]
    page = (out / "table.md").read_text()
    assert page == (
        "# A table of my own\n\nSeeds 0, 1.\n\n## Cora\n\n"
        "| method | ours | paper | gain | n |\n| --- | --- | --- | --- | --- |\n"
        "| mine | 0.800 ± 0.000 | 0.75 | +0.0 ± 0.0 | 2 |\n"
        "| other | 0.800 ± 0.000 | – | – | 2 |\n"
    )
    rows = json.loads((out / "table.json").read_text())
    assert [r["mean"] for r in rows if r["metric"] == "precision-last"] == pytest.approx([0.3] * 2)
    main(own_table, out, only=only, seeds=None, rounds=3)
    assert len(simulated) == 4  # what is there is not run again


def test_an_interrupted_reproduce_leaves_a_page_and_goes_on(
    own_table: str, tmp_path: Path, simulated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    only = {"data": ["Cora"], "method": ["mine"]}
    with pytest.raises(RuntimeError, match="the run broke"):
        main(own_table, tmp_path, only=only, seeds=[0, 7, 2], rounds=3)
    page = (tmp_path / "table.md").read_text()
    assert "- Table one, Cora, mine: 1 of 3 runs" in page and "| mine | 0.800 | 0.75 |" in page
    main(own_table, tmp_path, only=only, seeds=[0, 2], rounds=3)
    assert [config.seed for config in simulated] == [0, 2]
    assert "2 runs, 1 of them there already" in capsys.readouterr().out
    assert "Not run" not in (tmp_path / "table.md").read_text()


def test_data_that_cannot_be_had_are_left_out_and_named(
    own_table: str, tmp_path: Path, simulated: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(config: Any) -> None:
        if config.data.name != load_config("fedgls/cora").data.name:
            raise DataError("not in /some/folder")

    monkeypatch.setattr(command, "cached_data", load)
    main(own_table, tmp_path, only={}, seeds=[0], rounds=1)
    page = (tmp_path / "table.md").read_text()
    assert "- CiteSeer: not in the data root, and it could not be downloaded" in page
    assert "/some/folder" not in page
    with pytest.raises(DataError, match="none of the data sets is there: CiteSeer: not in the"):
        main(own_table, tmp_path, only={"data": ["CiteSeer"]}, seeds=[0], rounds=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tittle": "x"}, "tittle"),
        ({"methods": {"mine": {"setting": []}}}, "setting.*in methods.mine"),
        (
            {"tables": {"one": [{"table": "x", "rows": ["accuracy"]}]}},
            "metric: 'accuracy' is not one",
        ),
        ({"tables": {"one": [{"table": "x", "rows": [{"metric": "a", "off": "b"}]}]}}, "off"),
        ({"config": "fedgls/{dato}"}, "'dato' is unknown"),
        ({"config": "fedgls/coral"}, "fedgls/coral"),
        ({"centralised": "flower_graph.no_such:thing"}, "no_such"),
        ({"page": [{"values": "json:no", "tables": {}}]}, "json:no"),
    ],
)
def test_what_a_file_gets_wrong_is_named(
    change: dict[str, Any], said: str, tmp_path: Path, simulated: list[RunConfig]
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(OWN | change, sort_keys=False))
    with pytest.raises(ConfigError, match=said):
        main(str(path), tmp_path / "out", only={}, seeds=[0], rounds=3)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for text, said in (("- a\n", "not a mapping"), ("a: [", "malformed YAML")):
        (tmp_path / "own.yaml").write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_table(str(tmp_path / "own.yaml"))
    with pytest.raises(ConfigError, match="No such file"):
        read_table(str(tmp_path / "none.yaml"))


def test_a_run_with_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """The shipped config may have changed since; its name has not."""
    run = asked_of("fedgls").runs()[0]
    path, settings = (
        experiments._path(tmp_path, run),
        experiments.settings_of(experiments._config(run)),
    )
    for stored, is_missing in (
        (settings, False),
        ({}, False),  # older versions did not say
        (settings | {"graph.tau": -1.0}, True),
        ({k: v for k, v in settings.items() if k != "graph.tau"}, False),
    ):
        path.write_text(json.dumps({"settings": stored, "curves": {}}))
        assert (left_to_run([run], tmp_path) == [run]) == is_missing


@pytest.mark.slow
@every_table
def test_pictures_are_on_the_page(name: str, tmp_path: Path, simulated: list[RunConfig]) -> None:
    del simulated
    asked = asked_of(name, data=tuple(read_table(name).data)[:1], seeds=(0,))
    experiments.run_stages(
        asked.stages(), tmp_path / "runs", lambda: None, lambda config: [report(1, 0.5, 0.5)]
    )
    write_page(tmp_path, asked, [])
    page = (tmp_path / "table.md").read_text()
    pictures = [path for path in tmp_path.iterdir() if path.suffix == ".png"]
    assert pictures
    for path in pictures:
        assert f"({path.name})" in page
        assert path.read_bytes().startswith(b"\x89PNG")
