"""What holds for every paper's tables, and for a table of a stranger's."""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import asdict
from itertools import pairwise
from math import nan
from pathlib import Path
from shutil import copyfile
from typing import Any, NamedTuple

import pytest
import yaml
from federation import one_fast
from matplotlib.figure import Figure
from table_helpers import OWN, asked_of, made_up, report, written

from flower_graph.apps import parallel
from flower_graph.apps.reproduce import command, experiments
from flower_graph.apps.reproduce.asked import Asked
from flower_graph.apps.reproduce.command import announce, in_place, main, write_page
from flower_graph.apps.reproduce.experiments import (
    RUNS,
    Curves,
    Experiment,
    Run,
    Runs,
    Store,
    curves_of,
    left_to_run,
    read_curves,
    thinned,
)
from flower_graph.apps.reproduce.page import formatted, make_page
from flower_graph.apps.reproduce.rows import TEST, find, make_rows, missing_runs, row
from flower_graph.apps.reproduce.table import read_table, tables
from flower_graph.config.common import RunConfig
from flower_graph.errors import ConfigError, DataError, OutputError
from flower_graph.method.load import list_configs, load_config
from flower_graph.method.registry import known_apps, method_named, method_of
from flower_graph.report.plots.base import band
from flower_graph.storage import reading as files_reading
from flower_graph.storage.files import write_packed
from flower_graph.storage.reading import read_packed

RESULTS = Path(__file__).parents[2] / "docs" / "results"
# Those of the papers' tables; a benchmark made the others
COMMITTED = sorted(
    path.parent for path in RESULTS.glob(f"*/{RUNS}") if path.parent.name != "own-graph"
)


class Paper(NamedTuple):
    """A paper's tables with two seeds and three rounds, and what is made of made-up runs."""

    name: str
    asked: Asked
    runs: Runs
    rows: list[dict[str, Any]]


# One of them in `make test`, as the others load hundreds of configs
@pytest.fixture(scope="module", params=one_fast(tables(), "ppfl"))
def paper(request: pytest.FixtureRequest) -> Paper:
    asked = asked_of(request.param)
    runs = made_up(asked)
    return Paper(request.param, asked, runs, make_rows(asked, runs))


def test_methods_name_the_tables_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {one for app in known_apps() for one in method_named(app).tables}
    assert {*tables()} == named >= {"fedgls", "fedscem", "nfedgnn", "ppfl", "personalised"}
    assert not [name for name in list_configs() if name.startswith("reproduce")]
    with pytest.raises(ConfigError, match=r"'fedgl'.*'fedgls'"):
        main("fedgl", tmp_path, only={}, seeds=None, rounds=None)
    with pytest.raises(ConfigError, match=f"{', '.join(tables())}"):
        main("somebody-elses", tmp_path, only={}, seeds=None, rounds=None)
    (tmp_path / "mine.yaml").write_text(OWN)  # a method's that a stranger brings
    monkeypatch.setattr(method_named("fedpub"), "tables", (str(tmp_path / "mine.yaml"),), False)
    assert read_table("mine").title == "A table of my own"


@pytest.mark.slow
@pytest.mark.parametrize("folder", COMMITTED, ids=lambda one: one.name)
def test_committed_runs_are_those_of_the_tables(folder: Path) -> None:
    """Nobody runs again what is there: names, settings, seeds and rounds are still asked for."""
    asked, store = (
        asked_of(folder.name, seeds=None, rounds=None, named=frozenset({"table"})),
        Store(folder),
    )
    kept = [*store]
    assert kept and not {*kept} - {*asked.runs()}
    assert left_to_run(kept, store) == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", COMMITTED, ids=lambda one: one.name)
def test_committed_tables_come_out_of_the_committed_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever changes a table or how it is made sees which figures change, to the byte."""
    page = (folder / "table.md").read_text("utf-8")
    kept = read_packed(folder / RUNS)
    table = read_table(folder.name)
    names = {row["data"] for row in kept["rows"]}
    data = tuple(one for one in table.data if any(name.startswith(one) for name in names))
    left_out = [line[2:] for line in page.partition("## Not run")[2].split("\n") if line]
    asked = asked_of(folder.name, seeds=None, rounds=None, data=data)
    measured = {part.table for part in sum(table.tables.values(), ()) if part.measure}
    copyfile(folder / RUNS, tmp_path / RUNS)
    pictures = re.findall(r"`(\S+\.png)`", page)
    monkeypatch.setattr(command, "draw", lambda *_: pictures)
    by_hand = [row for row in kept["rows"] if row["table"] in measured]
    write_page(Store(tmp_path), asked, left_out, by_hand)
    assert read_packed(tmp_path / RUNS) == kept
    for name in ("table.md", "choices.md"):
        wanted, made = folder / name, tmp_path / name
        assert made.exists() == wanted.exists()
        assert not made.exists() or made.read_bytes() == wanted.read_bytes(), name


def test_results_stay_small() -> None:
    """Pictures and runs were 7,000 files; whoever keeps more packs them or leaves them out."""
    said = subprocess.run(["git", "ls-files", "-z", "."], cwd=RESULTS, capture_output=True)
    files = [RESULTS / name for name in said.stdout.decode().split("\0") if name]
    files = [path for path in files if path.exists()]
    assert len(files) <= 80 and sum(path.stat().st_size for path in files) <= 3_000_000


def test_every_run_once_whole_seeds_first(paper: Paper) -> None:
    runs = paper.asked.runs()
    assert len(runs) == len(set(runs))
    for stage in paper.asked.stages():
        assert len({run.seed for run in stage}) == 1


def test_rows_and_page_have_all_figures(paper: Paper) -> None:
    keys = [json.dumps({k: r[k] for k in r if k != "values"}) for r in paper.rows]
    assert len(set(keys)) == len(keys)
    for r in paper.rows:
        assert r["values"] and math.isfinite(r["mean"])
        assert r["settings"]["config"] in list_configs()
    no_paper = {
        "personalised",
        "heat-map",
        "fedgls-why",
        "nfedgnn-summed",
        "links",
        "values",
    }  # tables that no paper has
    assert any(r["paper"] is not None for r in paper.rows) == (paper.name not in no_paper)
    assert missing_runs(paper.asked, paper.runs) == []
    page = make_page(paper.asked, paper.runs, paper.rows, ["Elsewhere: not there"])
    assert "- Elsewhere: not there" in page and "nan" not in page
    for above, line in pairwise(page.splitlines()):
        if above.startswith("|") and line.startswith("|"):
            assert above.count("|") == line.count("|")  # every line has all columns of its table


def test_rows_with_fewer_runs_than_seeds_are_named(paper: Paper) -> None:
    asked, runs = paper.asked, {one: dict(by_seed) for one, by_seed in paper.runs.items()}
    group = next(g for g in asked.groups() if len(g.seeds) == 2)
    for one in group.experiments:
        del runs[one][1]
    missing = missing_runs(asked, runs)
    assert f"{group.words}: 1 of 2 runs" in missing
    rows = make_rows(asked, runs)
    assert any(r["seeds"] == [0] for r in rows)
    assert f"- {group.words}: 1 of 2 runs" in make_page(asked, runs, rows, missing)
    assert make_rows(asked, {}) == []
    empty = make_page(asked, {}, [], missing_runs(asked, {}))
    assert "## Table" not in empty and f"- {group.words}: 0 of 2 runs" in empty


def test_what_is_unknown_is_refused(paper: Paper, tmp_path: Path) -> None:
    has_data = "data" in paper.asked.table.only
    unknown = f"data=Coral: unknown; allowed are {paper.asked.data[0]}"
    for only, said in (
        ({"dat": ["Cora"]}, "dat"),
        ({"data": ["Coral"]}, unknown if has_data else "data: unknown key"),
        ({"table": ["table-9"]}, "table=table-9: unknown; allowed are"),
    ):
        with pytest.raises(ConfigError, match=said):
            main(paper.name, tmp_path / "out", only=only, seeds=[0], rounds=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_pictures_are_on_the_page(paper: Paper, tmp_path: Path, simulated: list[RunConfig]) -> None:
    asked = asked_of(paper.name, data=paper.asked.data[:1], seeds=(0,))
    trained = dict.fromkeys(in_place(asked), lambda config: [report(1, 0.5, 0.5)])
    store = Store(tmp_path)
    experiments.run_stages(asked.stages(), store, lambda: None, trained)
    write_page(store, asked, [])
    page = (tmp_path / "table.md").read_text()
    pictures = [path for path in tmp_path.iterdir() if path.suffix == ".png"]
    assert bool(pictures) == bool(asked.table.pictures)
    for path in pictures:
        assert f"`{path.name}`" in page and path.read_bytes().startswith(b"\x89PNG")


# Runs with a stub in place of training -----------------------------------------------------------


@pytest.fixture
def own_table(tmp_path: Path) -> str:
    (tmp_path / "own.yaml").write_text(OWN)
    return str(tmp_path / "own.yaml")


def test_a_table_of_ones_own(own_table: str, tmp_path: Path, simulated: list[RunConfig]) -> None:
    out, only = tmp_path / "out", {"data": ["Cora"]}
    main(own_table, out, only=only, seeds=None, rounds=3)
    assert [config.seed for config in simulated] == [0, 0, 1, 1]
    page = (out / "table.md").read_text()
    assert page == (
        "# A table of my own\n\nSeeds 0, 1.\n\n## Cora\n\n"
        "| method | ours | paper | gain | n |\n| --- | --- | --- | --- | --- |\n"
        "| mine, 3 rounds | 0.800 ± 0.000 | 0.75 | +0.0 ± 0.0 | 2 |\n"
        "| other, 3 rounds | 0.800 ± 0.000 | – | – | 2 |\n"
    )
    rows = written(out)
    assert [r["mean"] for r in rows if r["metric"] == "precision"] == pytest.approx([0.2] * 2)
    main(own_table, out, only=only, seeds=None, rounds=3)
    assert len(simulated) == 4  # what is there is not run again


GENERATED = ["data.name=csbm", "data.nodes=2000", "partition.clients=5"]


def test_a_figure_stands_in_a_run_s_place(
    tmp_path: Path, simulated: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    kind = type(method_named("fedgls"))
    baselines = kind.baselines

    def counted(method: Any, config: RunConfig) -> Any:
        computed.append(config.seed)
        return baselines(method, config)

    monkeypatch.setattr(kind, "baselines", counted)
    tree = yaml.safe_load(OWN)
    tree["methods"] |= {"guess": {"baseline": "majority"}, "lp": {"baseline": "label-propagation"}}
    tree["data"] = {"Cora": {"settings": GENERATED}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree))
    only = {"data": ["Cora"], "method": ["guess", "lp", "mine"]}
    main(str(tmp_path / "own.yaml"), tmp_path / "out", only=only, seeds=[0], rounds=3)
    assert len(simulated) == 1 and computed == [0]  # mine; both baselines at once
    (made, *_) = [
        r for r in written(tmp_path / "out") if (r["method"], r["metric"]) == ("guess", TEST)
    ]
    config = load_config("fedgls/cora", [*GENERATED, "seed=0", "rounds=3"])
    wanted = method_of(config).baselines(config)["majority"]
    assert made["mean"] == pytest.approx(wanted["test"], abs=1e-5)
    assert f"| guess | {made['mean']:.3f} |" in (tmp_path / "out" / "table.md").read_text()


def test_an_interrupted_reproduce_leaves_a_page_and_goes_on(
    own_table: str, tmp_path: Path, simulated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    only = {"data": ["Cora"], "method": ["mine"]}
    with pytest.raises(RuntimeError, match="broke"):
        main(own_table, tmp_path, only=only, seeds=[0, 7, 2], rounds=3)
    page = (tmp_path / "table.md").read_text()
    assert (
        "- Table one, Cora, mine: 1 of 3 runs" in page
        and "| mine, 3 rounds | 0.800 | 0.75 |" in page
    )
    main(own_table, tmp_path, only=only, seeds=[0, 2], rounds=3)
    assert [config.seed for config in simulated] == [0, 2]
    assert "2 runs, 1 of them" in capsys.readouterr().out
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
    with pytest.raises(DataError, match="CiteSeer"):
        main(own_table, tmp_path, only={"data": ["CiteSeer"]}, seeds=[0], rounds=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tittle": "x"}, "tittle"),
        ({"methods": {"mine": {"setting": []}}}, "methods.mine"),
        (
            {"tables": {"one": [{"table": "x", "rows": ["accuracy"]}]}},
            "metric: 'accuracy'",
        ),
        ({"tables": {"one": [{"table": "x", "rows": [{"metric": "a", "off": "b"}]}]}}, "off"),
        ({"config": "fedgls/{dato}"}, "'dato'"),
        ({"config": "fedgls/coral"}, "fedgls/coral"),
        ({"methods": {"mine": {"centralised": "flower_graph.no_such:thing"}}}, "no_such"),
        (
            {"methods": {"mine": {"baseline": "regression", "settings": GENERATED}}},
            "baseline: 'regression'",
        ),
        ({"page": [{"values": "json:no", "tables": {}}]}, "json"),
        ({"page": [{"like": "coasts"}]}, "like: 'coasts'"),
        ("- a\n", "mapping"),
        ("a: [", "malformed"),
    ],
)
def test_what_a_file_gets_wrong_is_named(
    change: dict[str, Any] | str, said: str, tmp_path: Path, simulated: list[RunConfig]
) -> None:
    path = tmp_path / "own.yaml"
    tree = change if isinstance(change, str) else yaml.safe_dump(yaml.safe_load(OWN) | change)
    path.write_text(tree)
    with pytest.raises(ConfigError, match=said):
        main(str(path), tmp_path / "out", only={}, seeds=[0], rounds=3)
    with pytest.raises(ConfigError, match="No such file"):
        read_table(str(tmp_path / "none.yaml"))


def test_a_run_with_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """The shipped config may have changed since; its name has not."""
    run = asked_of("fedgls").runs()[0]
    path = experiments._path(tmp_path / "runs", run)
    path.parent.mkdir()
    settings = parallel.settings_of(experiments.config_of(run))
    for stored, is_missing in (
        (settings, False),
        ({}, False),  # older versions did not say
        (settings | {"graph.tau": -1.0}, True),
        ({k: v for k, v in settings.items() if k != "graph.tau"}, False),
    ):
        kept = dict(zip(experiments.WHICH, (asdict(run.experiment), *run[1:]), strict=True))
        curves = {"cross_entropy": [1.0], "val_accuracy": [0.5], "test_accuracy": [0.5]}
        path.write_text(json.dumps(kept | {"settings": stored, "curves": curves}))
        assert (left_to_run([run], Store(tmp_path)) == [run]) == is_missing


def test_long_runs_keep_the_rounds_that_figures_are_of() -> None:
    rounds = 95
    val = [0.1 + 0.3 * (place == 33) + 0.1 * (place == 57) for place in range(rounds)]
    test = [place / 100 for place in range(rounds)]
    whole = Curves([1.2345] * rounds, val, test, steps=[1.0] * rounds)
    less = thinned(whole)
    kept = [place for place, one in enumerate(less.test_accuracy) if not math.isnan(one)]
    assert kept == [*range(10), 19, 29, 33, 39, 49, 59, 69, 79, 89, 94]  # 57 is below 33
    for name in ("best_round", "best_val", "test_at_best_val", "best_so_far", "steps"):
        assert getattr(less, name) == getattr(whole, name)
    assert less.ended(20) == whole.ended(20) and less.test_accuracy[-1] == test[-1]
    assert less.cross_entropy[0] == 1.23
    short = thinned(Curves([1.0] * 50, [0.1] * 50, test[:50]))
    assert short.test_accuracy == test[:50]
    scored = {"mse": {"train": [1.0], "val": [1.0], "test": [1.0]}}
    assert [*thinned(Curves([1.0], [0.1], [0.1], scores=scored)).scores["mse"]] == ["val", "test"]


def test_pictures_draw_through_rounds_that_were_left_out() -> None:
    axes = Figure().subplots()
    band(axes, [[0.1, nan, 0.3, 0.4], [0.2, nan, nan, 0.5]], "x", 0, "x")
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [pytest.approx([1, 0.15]), pytest.approx([4, 0.45])]


def test_a_file_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_packed(tmp_path / RUNS, {"rows": [], "choices": [], "runs": [], "more": "x" * 9999})
    assert [*Store(tmp_path)] == []
    monkeypatch.setattr(files_reading, "MOST_PACKED", 9999)
    with pytest.raises(OutputError, match="9,999 bytes"):
        Store(tmp_path)


def test_a_store_has_what_files_of_runs_and_the_one_file_have(tmp_path: Path) -> None:
    runs = [Run(Experiment("Cora", "GCN", "x", "fedgls/cora", ()), seed, 1) for seed in range(3)]
    curves = {"cross_entropy": [1.0], "val_accuracy": [0.5], "test_accuracy": [0.5]}

    def leave(run: Run) -> None:
        kept = dict(zip(experiments.WHICH, (asdict(run.experiment), *run[1:]), strict=True))
        path = experiments._path(tmp_path / "runs", run)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept | {"settings": {}, "curves": curves}))

    leave(runs[2])
    leave(runs[0])
    Store(tmp_path).write([], [])
    assert [path.name for path in tmp_path.iterdir()] == [RUNS]
    first = (tmp_path / RUNS).read_bytes()
    Store(tmp_path).write([], [])
    assert (tmp_path / RUNS).read_bytes() == first
    leave(runs[1])  # as of a command that was stopped before it wrote the one file
    store = Store(tmp_path)
    assert {*store} == {*runs} and left_to_run(runs, store) == []
    (tmp_path / RUNS).write_bytes(first[:-9])
    with pytest.raises(OutputError, match=RUNS):
        Store(tmp_path)


def test_a_graph_of_ones_own_may_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept run names the file alone, no folder of the machine that it was made on."""
    run = Run(Experiment("Mine", "GCN", "FedAvg", "fedavg/own-graph", ("data.name=mine.pt",)), 0, 1)
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        settings = experiments._settings(experiments.config_of(run))
        assert settings["data.name"] == "mine.pt"


def test_files_of_older_versions_still_load() -> None:
    curves = read_curves({"cross_entropy": [1.0], "val_accuracy": [None], "test_accuracy": [0.5]})
    assert (curves.alignment, curves.judged, curves.structure) == ({}, {}, {})
    assert math.isnan(curves.val_accuracy[0]) and curves.best_round == 0
    assert curves_of([report(1, 0.5, 0.5)], {}, 2, 5).judged == {}


def test_what_is_left_is_told_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [Run(Experiment("Cora", "GCN", "x", "fedgls/cora", ()), seed, 1) for seed in range(4)]
    monkeypatch.setattr(command, "left_to_run", lambda runs, store: runs[1:])
    monkeypatch.setattr(command, "workers_for", lambda runs: 2)
    announce(runs, Store(tmp_path))
    assert [word for word in capsys.readouterr().out.split() if word.isdigit()] == ["4", "1", "2"]


def test_figures_as_text() -> None:
    one = Experiment("Cora", "GCN", "FedGLS", "fedgls/cora", ("a=1", "a=2"))
    two = row("t", one, "x", {0: 0.011, 1: 0.013}, 1, 0.0289)
    two |= {"paper-std": 0.001, "rounds": [1, 1]}
    alone, gap = row("t", one, "x", {0: -0.25}, 1), row("t", one, "x", {0: 0.5, 1: nan}, 1)
    for how, found, text in (
        ("accuracy", [two], "0.012 ± 0.001"),
        ("percent", [None, two], "1.2 ± 0.1"),
        ("points", [two], "+1.2 ± 0.1"),
        ("number", [two], "0.01 ± 0.00"),
        ("paper:.1f:100", [two], "2.9"),
        ("paper:+.1f:100", [two], "+2.9"),
        ("paper-deviation", [two], "0.0289 ± 0.0010"),
        ("points", [alone], "-25.0"),  # one seed has no deviation
        ("paper:.3f", [alone], "–"),
        ("reached", [two], "no"),
        ("reached", [alone], "–"),
        ("positive", [two], "2 of 2"),
        ("above:0.01", [two], "yes"),
        ("setting:a", [two], "2"),
        ("setting:b", [two], "–"),
        ("setting:a", [alone], "–"),  # nothing is trained
        ("key:paper-std:.2f", [two], "0.00"),
        ("percent→", [two, alone], "1.2 ± 0.1 → -25.0"),
        ("seeds", [two, two], "2"),
        ("seeds", [two, alone, None], "2, 1, 0"),
        ("accuracy", [None], "–"),
    ):
        assert formatted(how, found) == text
    with pytest.raises(ConfigError, match="format: 'acuracy'"):
        formatted("acuracy", [None])
    assert (alone["std"], gap["mean"] == gap["mean"], find([gap], metric="x")) == (0.0, False, None)
