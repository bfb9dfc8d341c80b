"""What holds for every paper's tables, and for a table of a stranger's."""

import math
import re
import subprocess
from dataclasses import replace
from math import nan
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from app_helpers import InlinePool
from matplotlib.figure import Figure as Drawing
from table_helpers import (
    GENERATED,
    leave,
    only_row,
    own_lines,
    report,
    run_lines,
    written,
)

from flower_graph.apps import parallel
from flower_graph.apps.reproduce import command, runs
from flower_graph.apps.reproduce.command import selected, write_page
from flower_graph.apps.reproduce.page import (
    all_rows,
    make_page,
    measured_rows,
)
from flower_graph.apps.reproduce.runs import (
    RUNS,
    Curves,
    Run,
    Store,
    settings_kept,
    thinned,
)
from flower_graph.apps.reproduce.table import (
    LAST,
    TEST,
    VALIDATION,
    Paper,
    papers,
    read_paper,
)
from flower_graph.config.common import RunConfig
from flower_graph.errors import ConfigError, DataError, OutputError
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_named, method_of
from flower_graph.report.plots import draw_panel, over_rounds
from flower_graph.storage import reading as files_reading
from flower_graph.storage.reading import read_packed
from flower_graph.strategies.fedscem import tables as fedscem_tables

RESULTS = Path(__file__).parents[2] / "docs" / "results"
COMMITTED = [name for name in papers() if (RESULTS / name / RUNS).exists()]


def test_methods_name_the_tables_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {*papers()} >= {"fedgls", "fedscem", "nfedgnn", "ppfl", "personalised"}
    path = tmp_path / "mine.py"
    monkeypatch.setattr(method_named("fedpub"), "tables", (str(path),), False)
    head = "from flower_graph.apps.reproduce.table import Line, Paper\n"
    path.write_text(f"{head}PAPER = Paper('Of a stranger', {{}})")
    assert read_paper("mine").title == "Of a stranger"
    for text in ("PAPER = 3", "import nothing", ""):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"paper: .*mine\.py"):
            read_paper("mine")
    for name in ("fedgl", "none.py"):
        with pytest.raises(ConfigError, match=f"paper.*{name}"):
            read_paper(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMITTED)
def test_committed_tables_come_out_of_the_committed_runs(name: str, tmp_path: Path) -> None:
    """Whoever changes a table or how it is made sees which figures change, to the byte."""
    folder = RESULTS / name
    page, kept = (folder / "table.md").read_text("utf-8"), read_packed(folder / RUNS)
    for file in (RUNS, "README.md"):
        copyfile(folder / file, tmp_path / file)
    store, paper = Store(tmp_path), selected(read_paper(name), {})
    has = {run.config for run in store.kept}
    paper = paper.having({line: line for line in paper.lines if line.config in has})
    measured = {
        line: [
            row
            for row in kept["rows"]
            if (row["table"], row["data"], row["method"]) == (line.table, line.data, line.method)
        ]
        for line in paper.lines
        if line.measure
    }
    left_out = [line[2:] for line in page.partition("## Not run")[2].split("\n") if line]
    write_page(store, paper, left_out, measured)
    assert read_packed(tmp_path / RUNS) == kept
    for file in ("table.md", "choices.md"):
        wanted, came = folder / file, tmp_path / file
        assert came.exists() == wanted.exists()
        assert not came.exists() or came.read_bytes() == wanted.read_bytes(), file
    assert {path.name for path in tmp_path.glob("*.png")} == {*re.findall(r"`(\S+\.png)`", page)}
    # Nobody runs again what is there: settings, seeds and rounds are still asked for
    assert store.left(run for stage in store.stages(paper.asked) for run in stage) == []
    of_all = (run for stage in store.stages(paper.tables.values()) for run in stage)
    keys = {run.key for run in of_all}
    # "personalised" keeps runs on the rows' seeds of settings that no row takes any more
    assert name == "personalised" or all(run.key in keys for run in store.kept)


def test_results_stay_small() -> None:
    """Pictures and runs were 7,000 files; whoever keeps more packs them or leaves them out."""
    said = subprocess.run(["git", "ls-files", "-z", "."], cwd=RESULTS, capture_output=True)
    files = [RESULTS / name for name in said.stdout.decode().split("\0") if name]
    files = [path for path in files if path.exists()]
    assert len(files) <= 80 and sum(path.stat().st_size for path in files) <= 3_000_000


# Runs with a stub in place of training -----------------------------------------------------------


def test_a_table_of_ones_own(tmp_path: Path, simulated: list[RunConfig]) -> None:
    page = run_lines(own_lines(), tmp_path)
    assert [config.seed for config in simulated] == [0, 0, 1, 1]
    assert page.startswith("# A table of my own\n\nMean ± sample deviation")
    table = (
        "## Table one\n\n"
        "| method | test | paper's test | gain | precision | n |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| mine, 3 rounds | 0.800 ± 0.000 | 0.7500 | +0.0 ± 0.0 (p –, Holm –, 0 of 2) "
        "| 0.200 ± 0.000 | 2 |\n"
        "| other, 3 rounds | 0.800 ± 0.000 | – | – | 0.200 ± 0.000 | 2 |\n"
    )
    assert table in page
    run_lines(own_lines(), tmp_path)
    assert len(simulated) == 4  # what is there is not run again
    run_lines(own_lines(keys={"k": 30}, settings=["graph.neighbours=30"]), tmp_path)
    assert len(simulated) == 4  # nor is what other words say


def test_a_figure_stands_in_a_run_s_place(tmp_path: Path, simulated: list[RunConfig]) -> None:
    mine, *_ = lines = own_lines(settings=GENERATED, seeds=(0,))
    lines += [
        replace(mine, method=name, trained=trained, figures=[TEST])
        for name, trained in {"guess": "majority", "lp": "label-propagation"}.items()
    ]
    page = run_lines(lines, tmp_path, method=["guess", "lp", "mine"])
    assert len(simulated) == 1
    row = only_row(written(tmp_path), method="guess", metric=TEST)
    config = load_config("fedgls/cora", [*mine.settings, "seed=0", "rounds=3"])
    wanted = method_of(config).baselines(config)["majority"]
    assert row["mean"] == pytest.approx(wanted["test"], abs=1e-5)
    assert f"| guess | {row['mean']:.3f} |" in page
    for wrong, said in (
        ({"trained": "regression"}, "trained"),
        ({"trained": "flower_graph.no_such:it"}, "no_such"),
        ({"figures": ["accuracy"]}, "figure: 'accuracy'"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_lines([replace(mine, **wrong)], tmp_path / "wrong")


def test_an_interrupted_reproduce_leaves_a_page_and_goes_on(
    tmp_path: Path, simulated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="broke"):
        run_lines(own_lines(), tmp_path, seeds=[0, 7, 2], method=["mine"])
    page = (tmp_path / "table.md").read_text()
    assert "- Table one, Cora, GCN, mine: 1 of 3 runs" in page
    assert "| mine, 3 rounds | 0.800 | 0.7500 |" in page
    page = run_lines(own_lines(), tmp_path, seeds=[0, 2], method=["mine"])
    assert [config.seed for config in simulated] == [0, 2]
    said = capsys.readouterr().out
    assert "2 runs, 1 of them done before; 1 run" in said and "Not run" not in page


def test_data_that_cannot_be_had_are_left_out_and_named(
    tmp_path: Path, simulated: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(config: Any) -> None:
        if config.data.name != load_config("fedgls/cora").data.name:
            raise DataError("not in /some/folder")

    monkeypatch.setattr(command, "cached_data", load)
    page = run_lines(own_lines(), tmp_path, seeds=[0], data=["Cora", "CiteSeer"])
    assert "- CiteSeer: not in the data root, and it could not be downloaded" in page
    assert "/some/folder" not in page
    with pytest.raises(DataError, match="CiteSeer"):
        run_lines(own_lines(), tmp_path, seeds=[0], data=["CiteSeer"])


def test_what_is_run_on_request_stays_on_the_page(
    tmp_path: Path, simulated: list[RunConfig]
) -> None:
    more = own_lines(table="More", settings=["graph.neighbours=9"])
    paper = Paper("Two", {"one": own_lines(), "more": more}, on_request=["more"])
    for only, count, more_is_there in (
        ({}, 4, False),
        ({"table": ["more"]}, 8, True),
        ({}, 8, True),
    ):
        command.reproduce(selected(paper, {"data": ["Cora"], **only}, None, 3), tmp_path)
        page = (tmp_path / "table.md").read_text()
        assert (len(simulated), "## More" in page) == (count, more_is_there)
        assert "Not run" not in page


# What is kept ------------------------------------------------------------------------------------

RUN = Run("fedgls/cora", (), 0, 1)


def test_a_run_with_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """The shipped config may have changed since; its name has not."""
    settings = settings_kept(RUN.settings)
    for stored, is_missing in (
        (settings, False),
        ({}, False),  # older versions did not say
        (settings | {"graph.tau": -1.0}, True),
        (settings | {"gone": 3}, False),  # it became a constant
        ({k: v for k, v in settings.items() if k != "graph.tau"}, False),
    ):
        leave(tmp_path, RUN, stored)
        assert (Store(tmp_path).left([RUN]) == [RUN]) == is_missing
    leave(tmp_path, RUN)
    said = RUN._replace(overrides=("graph.neighbours=30",))
    assert Store(tmp_path).left([RUN, said]) == []
    assert Store(tmp_path).left([said._replace(overrides=("graph.tau=0.3",))])
    assert Store(tmp_path).left([RUN._replace(trained="majority"), RUN._replace(seed=1)])


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
    axes = Drawing().subplots()
    panel = over_rounds("test", {"x": [[0.1, nan, 0.3, 0.4], [0.2, nan, nan, 0.5]]})
    draw_panel(axes, panel, ["x"])
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [pytest.approx([1, 0.15]), pytest.approx([4, 0.45])]


def test_a_store_has_what_files_of_runs_and_the_one_file_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [RUN._replace(seed=seed) for seed in range(3)]
    leave(tmp_path, kept[2])
    leave(tmp_path, kept[0])
    Store(tmp_path).write([], [])
    assert [path.name for path in tmp_path.iterdir()] == [RUNS]
    first = (tmp_path / RUNS).read_bytes()
    Store(tmp_path).write([], [])
    assert (tmp_path / RUNS).read_bytes() == first
    leave(tmp_path, kept[1])  # as of a command that was stopped before it wrote the one file
    store = Store(tmp_path)
    assert {*store.kept} == {*kept} and store.left(kept) == []
    older = Curves.read({"cross_entropy": [1.0], "val_accuracy": [None], "test_accuracy": [0.5]})
    assert (older.judged, older.structure) == ({}, {}) and math.isnan(older.val_accuracy[0])
    monkeypatch.setattr(files_reading, "MOST_PACKED", 99)  # bytes that it may unpack to
    with pytest.raises(OutputError, match="99 bytes"):
        Store(tmp_path)
    monkeypatch.undo()
    (tmp_path / RUNS).write_bytes(first[:-9])
    with pytest.raises(OutputError, match=RUNS):
        Store(tmp_path)


def test_a_graph_of_ones_own_may_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept run names the file alone, no folder of the machine that it was made on."""
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        config = load_config("fedavg/own-graph", ["data.name=mine.pt"])
        assert settings_kept(config)["data.name"] == "mine.pt"


# What one paper's tables alone have --------------------------------------------------------------


def test_costs_are_measured_in_the_place_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = [({"group": 1, "clients": 5}, {"nodes": 20.0, "peak-mib": 2.0})]
    monkeypatch.setattr(fedscem_tables, "costs", lambda config: figures)
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", InlinePool)
    monkeypatch.setattr(runs, "simulate_whole", lambda config: ([report(1, 0.5, 0.5)], {}))
    only = {"data": ["Cora"], "method": ["FedSCem"], "table": ["figure-8", "costs"]}
    paper = selected(read_paper("fedscem"), only)
    assert not [run for stage in Store(tmp_path).stages(paper.asked) for run in stage]
    results = measured_rows(paper.lines)
    rows = all_rows(results)
    assert only_row(rows, metric="nodes") | {"clients": 5, "group": 1} == rows[0]
    assert "| FedSCem | 1 | 5 | 20.0 | 2 |" in make_page(paper, results)
    seconds, memory = rows[2:]
    assert (seconds["mean"], seconds["paper"]) == (report(1, 0.5, 0.5).seconds, 3.795)
    assert memory["mean"] > 50 and memory["paper-gpu-memory-percent"] == 13.21


# Real runs ---------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "fedgls": (
        {"method": ["Fed-GNN_k", "FedGLS"], "table": ["table-1"]},
        ["partition.clients=4"],
    ),
    "fedscem": (
        {
            "method": ["Self-training", "FedSCem", "FedSCem, masked", "Global"],
            "table": ["table-1", "table-3", "strict", "masks", "figure-8"],
        },
        ["partition.clients=8"],
    ),
    "ppfl": (
        {"model": ["DeepWalk"], "table": ["table-1", "figures"]},
        # Few nodes to evaluate: the MLPs would take most of the time.
        [
            *("deepwalk.walks=1", "deepwalk.length=10", "gat.epochs=2", "judge.folds=2"),
            "partition.ratios=[0.8,0.1,0.1]",
        ],
    ),
}


def small(name: str, **only: list[str]) -> Paper:
    words, settings = SMALL[name]
    paper = selected(read_paper(name), {"data": ["Cora"], **words, **only}, [0], 2)
    more = ["data.name=cora-linqs", *settings]
    return paper.having(
        {line: replace(line, settings=[*line.settings, *more]) for line in paper.lines}
    )


def small_comparison(name: str, out: Path, **only: list[str]) -> list[dict[str, Any]]:
    command.reproduce(small(name, **only), out)
    return written(out)


def test_one_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", InlinePool)
    rows = small_comparison("fedgls", tmp_path, method=["FedGLS"])
    for metric in (TEST, LAST, VALIDATION, "precision", "homophily", "true-homophily"):
        assert 0 <= only_row(rows, metric=metric, table="Table 1")["mean"] <= 1
    assert (tmp_path / "figure-3-cora.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("fedscem", marks=pytest.mark.release), "ppfl"])
def test_a_small_comparison(name: str, tmp_path: Path) -> None:
    rows = small_comparison(name, tmp_path)
    assert all(0 <= r["mean"] <= 1 for r in rows if r["metric"] in (TEST, LAST, "micro-f1"))
    assert "Not run" not in (tmp_path / "table.md").read_text()
    if name == "fedscem":
        assert len([r for r in rows if r["table"] == "Figure 8"]) == 8 * 4
        key: dict[str, Any] = {"table": "Masks", "metric": LAST}
        methods = ("FedSCem, masked", "FedSCem")
        masked, plain = (only_row(rows, method=m, **key)["mean"] for m in methods)
        assert masked == pytest.approx(plain, abs=0.02)  # masks change nothing but the rounding
        assert only_row(rows, table="Table 1", method="Global")
    if name == "ppfl":
        key = {"method": "FED", "model": "DeepWalk"}
        last = only_row(rows, metric="micro-f1", table="Figure 3", iteration=22, **key)
        whole = only_row(rows, metric=LAST, table="Table 1", **key)
        assert last["mean"] == pytest.approx(whole["mean"])
