"""What holds for every paper's tables, and for a table of a stranger's; rows that are run again."""

import math
import re
import subprocess
from dataclasses import replace
from math import nan
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from matplotlib.figure import Figure as Drawing
from table_helpers import (
    GENERATED,
    grid_lines,
    leave,
    only_row,
    own_lines,
    report,
    run_lines,
    written,
)

from flower_graph.apps.cli.main import main
from flower_graph.apps.reproduce import command, runs
from flower_graph.apps.reproduce import table as t
from flower_graph.apps.reproduce.command import selected, write_page
from flower_graph.apps.reproduce.page import (
    marks,
    value_of,
    winner,
)
from flower_graph.apps.reproduce.page import written as written_as
from flower_graph.apps.reproduce.runs import (
    RUNS,
    Curves,
    Run,
    Store,
    curves_of,
    settings_kept,
    thinned,
)
from flower_graph.config.common import RunConfig
from flower_graph.errors import ConfigError, DataError, OutputError
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_named, method_of
from flower_graph.report.plots import Panel, draw_panel
from flower_graph.report.result import holm, paired
from flower_graph.storage import reading as files_reading
from flower_graph.storage.files import write_packed
from flower_graph.storage.reading import read_packed
from flower_graph.strategies.fedscem import tables as fedscem_tables

RESULTS = Path(__file__).parents[2] / "docs" / "results"
# The two papers with most runs are for a release
COMMITTED = [
    pytest.param(name, marks=[pytest.mark.release] * (name in ("fedscem", "nfedgnn")))
    for name in t.papers()
    if (RESULTS / name / RUNS).exists()
]


def test_methods_name_the_tables_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {*t.papers()} >= {"fedgls", "fedscem", "nfedgnn", "ppfl", "personalised"}
    path = tmp_path / "mine.py"
    monkeypatch.setattr(method_named("fedpub"), "tables", (str(path),), False)
    head = "from flower_graph.apps.reproduce.table import Line, Paper\n"
    path.write_text(f"{head}PAPER = Paper('Of a stranger', {{}})")
    assert t.read_paper("mine").title == "Of a stranger"
    for text in ("PAPER = 3", "import nothing", ""):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"paper: .*mine\.py"):
            t.read_paper("mine")
    for name in ("fedgl", "none.py"):
        with pytest.raises(ConfigError, match=f"paper.*{name}"):
            t.read_paper(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMITTED)
def test_committed_tables_come_out_of_the_committed_runs(name: str, tmp_path: Path) -> None:
    """Whoever changes a table or how it is made sees which figures change, to the byte."""
    folder = RESULTS / name
    page, kept = (folder / "table.md").read_text("utf-8"), read_packed(folder / RUNS)
    for file in (RUNS, "README.md"):
        copyfile(folder / file, tmp_path / file)
    store, paper = Store(tmp_path), selected(t.read_paper(name), {})
    has = {run.config for run in store.kept}
    paper = paper.having({line: line for line in paper.lines if line.config in has})
    left_out = [line[2:] for line in page.partition("## Not run")[2].split("\n") if line]
    write_page(store, paper, left_out)
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
    assert len(files) <= 96 and sum(path.stat().st_size for path in files) <= 3_000_000


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
        replace(mine, method=name, trained=trained, figures=[t.TEST])
        for name, trained in {"guess": "majority", "lp": "label-propagation"}.items()
    ]
    page = run_lines(lines, tmp_path, method=["guess", "lp", "mine"])
    assert len(simulated) == 1
    row = only_row(written(tmp_path), method="guess", metric=t.TEST)
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
    paper = t.Paper("Two", {"one": own_lines(), "more": more}, on_request=["more"])
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
    settings = {**settings_kept(RUN)}
    for stored, is_missing in (
        (settings, False),
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
    whole = curves(val, test, steps=[1.0] * rounds)
    less = thinned(whole)
    shown = less.scores["accuracy"]["test"]
    kept = [place for place, one in enumerate(shown) if not math.isnan(one)]
    assert kept == [*range(10), 19, 29, 33, 39, 49, 59, 69, 79, 89, 94]  # 57 is below 33
    assert (less.whole, less.best_so_far) == (whole.whole, whole.best_so_far)
    assert less.ended(20) == whole.ended(20) and less.loss[0] == 1.23
    assert thinned(curves([0.1] * 50, test[:50])).scores["accuracy"]["test"] == test[:50]


def test_pictures_draw_through_rounds_that_were_left_out() -> None:
    axes = Drawing().subplots()
    panel = Panel({"x": [[0.1, nan, 0.3, 0.4], [0.2, nan, nan, 0.5]]})
    draw_panel(axes, panel, ["x"])
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [pytest.approx([1, 0.15]), pytest.approx([4, 0.45])]


def test_a_store_has_what_files_of_runs_and_the_one_file_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [RUN._replace(seed=seed) for seed in range(3)]
    leave(tmp_path, kept[2])
    leave(tmp_path, kept[0])
    Store(tmp_path).write([])
    assert [path.name for path in tmp_path.iterdir()] == [RUNS]
    first = (tmp_path / RUNS).read_bytes()
    Store(tmp_path).write([])
    assert (tmp_path / RUNS).read_bytes() == first
    leave(tmp_path, kept[1])  # as of a command that was stopped before it wrote the one file
    store = Store(tmp_path)
    assert {*store.kept} == {*kept} and store.left(kept) == []
    monkeypatch.setattr(files_reading, "MOST_PACKED", 99)  # bytes that it may unpack to
    with pytest.raises(OutputError, match="99 bytes"):
        Store(tmp_path)
    monkeypatch.undo()
    (tmp_path / RUNS).write_bytes(first[:-9])
    with pytest.raises(OutputError, match=RUNS):
        Store(tmp_path)
    (tmp_path / RUNS).write_bytes(first)
    (tmp_path / "runs.jsonl").write_text("no JSON\n{}")
    with pytest.raises(OutputError, match=r"runs\.jsonl: .*line 1"):
        Store(tmp_path)


def test_a_graph_of_ones_own_may_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept run names the file alone, no folder of the machine that it was made on."""
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        settings_kept.cache_clear()
        kept = settings_kept(Run("fedavg/own-graph", ("data.name=mine.pt",), 0))
        assert kept["data.name"] == "mine.pt"


# What is measured in the place of runs ------------------------------------------------------------


def test_costs_are_measured_alone_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: list[RunConfig]
) -> None:
    figures = [({"group": 1, "clients": 5}, {"nodes": 20.0, "peak-mib": 2.0})]
    monkeypatch.setattr(fedscem_tables, "costs", lambda config: figures)
    only = {"data": ["Cora"], "method": ["FedSCem"], "table": ["figure-8", "costs"]}
    paper = selected(t.read_paper("fedscem"), only)
    assert [len(stage) for stage in Store(tmp_path).stages(paper.asked) if stage] == [1, 1]
    for _ in range(2):  # the second time everything is there
        command.reproduce(paper, tmp_path)
    assert len(simulated) == 1
    page, rows = (tmp_path / "table.md").read_text(), written(tmp_path)
    group = {"group": 1, "clients": 5, "mean": 20.0}
    assert only_row(rows, metric="nodes").items() >= group.items()
    assert "| FedSCem | 1 | 5 | 20.0 | 2 |" in page and "| 3.79 |" in page and "| 13.21 |" in page
    assert only_row(rows, metric="peak-mib", table="Cost")["mean"] > 50


# Settings that validation chooses, runs to their end, what accuracy costs ------------------------


def test_other_seeds_choose_and_all_that_was_tried_is_named(
    tmp_path: Path, simulated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second time everything is there
        page = run_lines(grid_lines(tried_on=["graph.tau=0.9"]), tmp_path)
    assert {(one.seed < 9, one.graph.tau) for one in simulated} == {(True, 0.2), (False, 0.9)}  # type: ignore[attr-defined]
    ran = [(config.seed, config.graph.neighbours) for config in simulated]  # type: ignore[attr-defined]
    tried = [(10, 3), (10, 7), (10, 7), (10, 9), (11, 3), (11, 7), (11, 7), (11, 9)]
    assert ran == [*tried, (0, 7), (0, 7), (1, 7), (1, 7)]
    said = capsys.readouterr().out
    assert "12 runs, 0 of them" in said and "12 runs, 12 of them" in said
    text = (tmp_path / "choices.md").read_text()
    line = (
        "| Table one, Cora, GCN, {} | {}graph.neighbours={}{} | {} ± 0.000 | 10, 11 | 3, 3 | yes |"
    )
    tried = [("mine", "", 3, "", "0.700"), ("mine", "**", 7, "**", "0.800")]
    tried += [("other", "**", 7, "**", "0.800"), ("other", "", 9, "", "0.700")]
    assert text.endswith("\n".join(line.format(*one) for one in tried) + "\n")
    rows = written(tmp_path)
    assert {tuple(row["seeds"]) for row in rows} == {(0, 1)}
    assert "graph.neighbours=7" in rows[0]["settings"]
    assert "| mine | 0.800 ± 0.000 | 0.7500 |" in page and "| neighbours=7 | 2 |" in page


def test_choices_name_the_metric_that_decides(
    tmp_path: Path, simulated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    run_lines(grid_lines(settings=["patience=1", "metrics=[auc,accuracy]"]), tmp_path)
    text = (tmp_path / "choices.md").read_text()
    assert "validation auc" in text and "accuracy" not in text
    assert "test auc 0.800 at the best validation" in capsys.readouterr().out


def test_what_accuracy_costs_and_who_wins(tmp_path: Path, simulated: list[RunConfig]) -> None:
    page = run_lines(grid_lines(), tmp_path)
    # A round has five steps and a MiB for each client
    assert "| method | 1 rounds | 10 steps | 2.5 MiB | the end | settings | n |" in page
    figures = "| 0.600 ± 0.000 | 0.800 ± 0.000 | 0.800 ± 0.000 | 0.800 ± 0.000 |"
    assert f"| mine {figures}" in page and f"| other {figures}" in page
    assert "| *Best* | mine (not apart: other) | mine (not apart: other) |" in page
    assert "`curves-cora.png`" in page and (tmp_path / "curves-cora.png").exists()


@pytest.mark.parametrize(
    ("change", "seeds", "said"),
    [
        ({"each": {"other": {"tries": []}}}, None, "other: tries"),
        ({"choosers": (1, 2)}, None, r"seeds.*\[1\]"),
        ({}, [3, 11], r"seeds.*\[11\]"),
    ],
)
def test_unfair_choices_are_refused(
    change: dict[str, Any], seeds: list[int] | None, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        run_lines(grid_lines(**change), tmp_path / "out", seeds=seeds)
    assert not (tmp_path / "out").exists()


def curves(val: list[float], test: list[float], **more: Any) -> Curves:
    scores = {"accuracy": {"val": val, "test": test}} | more.pop("scores", {})
    return Curves(scores, [1.2345] * len(val), **more)


CURVES = curves([0.1, 0.4, 0.3, nan], [0.2, 0.6, 0.9, 0.7])
CURVES.steps, CURVES.up = [2.0, 4.0, 6.0, 8.0], [2.0**20 * n for n in range(1, 5)]


def test_a_budget_is_a_number_of_what_a_client_spends() -> None:
    assert value_of(t.WITHIN, CURVES, {"within": "1 steps"}) is None  # less than a round
    for wrong in ("3 hours", "few steps"):
        with pytest.raises(ConfigError, match=f"within: '{wrong}'"):
            value_of(t.WITHIN, CURVES, {"within": wrong})


def test_of_errors_the_least_is_the_best_round() -> None:
    mse = {"mse": {"val": [4.0, nan, 2.0, 3.0], "test": [5.0, 1.0, 2.5, 2.0]}}
    found = curves([nan] * 4, [nan] * 4, scores=mse, metric="mse")
    assert (found.best_round, found.best("val"), found.best("test")) == (2, 2.0, 2.5)
    assert not found.ended(2)


def test_a_line_whose_rounds_went_without_clients_is_marked() -> None:
    assert marks([{"limit": 9, "left_out": 2}]) == ", at most 2 left out"


def test_clients_that_are_not_asked_spend_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "steps_of", lambda config: (2, 4))
    reports = [report(1, 0.5, 0.5), report(2, 0.5, 0.5)]
    reports[0].asked, reports[1].answered = 1, 1
    found = curves_of(reports, {}, load_config("fedgls/cora"))
    assert (found.steps, found.up, found.left_out) == ([2.0, 6.0], [2.0**20, 2.0**21], 1)
    assert value_of("steps-a-client", found, {}) == 6.0
    assert value_of("MiB-a-client", curves([0.1], [0.2]), {}) is None


def test_differences_of_errors_are_no_points() -> None:
    assert paired([0.1]) == {"p": None, "agree": 1} and paired([0.1, math.nan])["p"] is None
    row = {"mean": 0.0475, "std": 0.045, "values": [0.05] * 4, "seeds": [0, 1, 2, 3]}
    change = t.Figure("change", "test-mse-at-best-val", "other")
    raw = written_as(change, {**row, "p": 0.13, "holm": 0.26, "agree": 3}, 1)
    assert raw == "+0.05 ± 0.04 (p 0.13, Holm 0.26, 3 of 4)"


def test_many_tests_are_corrected_by_holm() -> None:
    # Holm's own example of step-down, and R's p.adjust(c(0.01, 0.02, 0.03, 0.005), "holm")
    assert holm([0.01, 0.02, 0.03, 0.005]) == pytest.approx([0.03, 0.04, 0.04, 0.02])
    assert holm([0.5, None, 0.4]) == [pytest.approx(0.8), None, pytest.approx(0.8)]
    assert holm([0.9, 0.7]) == [1.0, 1.0] and holm([]) == []


def test_of_errors_the_least_wins() -> None:
    rows = [
        {
            "method": name,
            "metric": "test-mse-at-best-val",
            "mean": mean,
            "seeds": [0],
            "values": [mean],
        }
        for name, mean in (("far", 0.9), ("near", 0.8))
    ]
    assert winner(rows) == "near (not apart: far)"


# Rows that are run again --------------------------------------------------------------------------


def test_lines_are_run_again_and_what_came_out_is_written(
    tmp_path: Path, simulated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    run_lines(own_lines(), tmp_path / "table")
    paper = tmp_path / "mine.py"
    paper.write_text(
        "from table_helpers import own_lines\nfrom flower_graph.apps.reproduce.table import Paper\n"
        "PAPER = Paper('Mine', {'one': own_lines(rounds=3)})"
    )
    words = ["reproduce", str(paper), "--again", str(tmp_path / "table")]
    words += ["--out", str(tmp_path / "out"), "--only", "data=Cora"]
    for more, ran in (([], [0, 0]), (["--seeds", "0,1"], [0, 1, 0, 1])):
        del simulated[:]
        assert main([*words, *more]) == 0
        assert [config.seed for config in simulated] == ran
    assert (tmp_path / "out" / "again.md").read_text().count("| near |") == 4
    stored = read_packed(tmp_path / "table" / RUNS)
    for run in stored["runs"]:
        run["curves"]["scores"]["accuracy"]["test"] = [0.1] * 3
    write_packed(tmp_path / "table" / RUNS, stored)
    assert main(words) == 1 and "**not near**" in capsys.readouterr().out
    for folder, said in ((tmp_path / "none", "no such file"), (tmp_path / "out", "no such file")):
        with pytest.raises(DataError, match=said):
            command.run_again(t.read_paper(str(paper)), folder, tmp_path / "new")
