"""What the server makes of its clients' tables, and what it knows of the best round."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from flower_graph.errors import ConfigError
from flower_graph.outputs.figures import HEAD, merge_clients, spread
from flower_graph.records.rounds import BestRound
from flower_graph.server.averaging import ReportedFedAvg


def _table(folder: Path, accuracies: dict[int, str]) -> None:
    folder.mkdir(parents=True)
    lines = [f"{c},last,9,10,1.5,,,{text},9,8,7" for c, text in accuracies.items()]
    (folder / "clients.csv").write_text("\n".join([",".join(HEAD), *lines]) + "\n")


def test_clients_tables_are_put_together_and_compared(tmp_path: Path) -> None:
    # Of eleven clients two are the worst tenth; one has no test nodes.
    _table(tmp_path / "clients" / "0", {0: "0.5", 10: "0.0", 2: ""})
    _table(tmp_path / "clients" / "1", {c: "0.5" for c in (1, 3, 4, 5, 6, 7, 8, 9, 11)})
    found = merge_clients(tmp_path)
    lines = (tmp_path / "clients.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == [str(c) for c in range(12)]
    assert found == {
        "last": {
            "test": {
                "worst-tenth": pytest.approx(0.25),
                "deviation": pytest.approx(0.5 * math.sqrt(10) / 11),
            }
        }
    }
    assert merge_clients(tmp_path / "elsewhere") == {}


def test_a_table_without_a_client_has_no_spread(tmp_path: Path, recwarn: Any) -> None:
    (tmp_path / "clients.csv").write_text(",".join(HEAD) + "\n")
    assert spread(tmp_path / "clients.csv") == {} and not recwarn.list


def test_the_best_is_the_first_of_the_highest_and_what_checkpoints_need_stays() -> None:
    best = BestRound()
    seen = [best.see(n, value) for n, value in enumerate([0.2, math.nan, 0.5, 0.5, 0.6], start=1)]
    assert seen == [True, False, True, False, True] and (best.number, best.last) == (5, 5)
    best = BestRound()
    for number, value in ((1, 0.1), (2, 0.2), (3, 0.3)):
        best.see(number, value)
        state = best.saving()
        best.saved()
    assert best.protected == state["protected"] == [2, 3]
    again = BestRound()
    again.load(state)
    assert (again.number, again.accuracy, again.protected) == (3, 0.3, [2, 3])


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"save": "some"}, "save"), ({"keep": "first"}, "keep"), ({"every": -1}, "every")],
)
def test_what_cannot_be_kept_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=said):
        ReportedFedAvg().start(None, **settings)  # type: ignore[arg-type]
