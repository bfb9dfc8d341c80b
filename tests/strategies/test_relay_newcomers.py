"""`data.add` and `data.remove`: the graph of a run whose users come and go."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from graph_helpers import small_graph
from torch_geometric.data import Data

from flower_graph.apps.cli.main import main
from flower_graph.apps.run import client_app, run_server
from flower_graph.data.folders.party import server_folder
from flower_graph.errors import ConfigError, DataError
from flower_graph.method.load import load_config
from flower_graph.simulation import InProcessGrid
from flower_graph.storage import checkpoint
from flower_graph.storage.reading import read_lines
from flower_graph.strategies.nfedgnn.method import hosted_users, users_graph, users_left

# name, class, part and the numbers of two features; friends are who stands beside whom
PEOPLE = {
    "anna": ("cat", "train", 1, 0),
    "bert": ("dog", "train", 0, 1),
    "cora": ("cat", "val", 3, 1),
    "dora": ("dog", "test", 1, 3),
}
NEW = {"eva": ("cat", "test", 1, 1), "fred": ("", "", 0, 5)}
FRIENDS = [("anna", "cora"), ("bert", "dora"), ("cora", "dora")]
NEW_FRIENDS = [("eva", "anna"), ("fred", "bert"), ("fred", "eva")]


def tables(folder: Path, people: dict[str, Any], friends: list[tuple[str, str]]) -> str:
    """A folder with a graph; `role` says who trains."""
    folder.mkdir(parents=True)
    lines = [f"{name},{','.join(map(str, said))}" for name, said in people.items()]
    (folder / "nodes.csv").write_text("\n".join(["name,label,split,age,size", *lines]) + "\n")
    lines = ["source,target", *(f"{a},{b}" for a, b in friends)]
    (folder / "edges.csv").write_text("\n".join(lines) + "\n")
    return str(folder)


def config_of(folder: Path, *more: str) -> Any:
    first = folder / "first"
    if not first.exists():
        tables(first, PEOPLE, FRIENDS)
    return load_config(
        "nfedgnn/own-graph", [f"data.name={first}", "data.features=standardise", *more]
    )


def test_old_users_stay_as_they_are_wherever_the_file_has_them(tmp_path: Path) -> None:
    old = users_graph(config_of(tmp_path))
    shuffled = dict(reversed((PEOPLE | NEW).items()))
    file = tables(tmp_path / "grown", shuffled, FRIENDS + NEW_FRIENDS)
    graph = users_graph(config_of(tmp_path, f"data.add={file}"))
    assert graph.names == ("anna", "bert", "cora", "dora", "fred", "eva")
    assert torch.equal(graph.x[:4], old.x), "mean and deviation are those of the old users"
    assert torch.equal(graph.y[:4], old.y) and graph.y[4:].tolist() == [-1, 0]
    assert graph.test_mask is not None and graph.test_mask.tolist() == [0, 0, 0, 1, 0, 1]
    pairs = {(a, b) for a, b in graph.edge_index.t().tolist() if a < b}
    assert pairs == {(0, 2), (1, 3), (2, 3), (0, 5), (1, 4), (4, 5)}
    mean, deviation = torch.tensor([5 / 4, 5 / 4]), torch.tensor([1, 0, 3, 1.0]).std(correction=0)
    expected = (torch.tensor([[0.0, 5], [1, 1]]) - mean)[:, 0] / deviation
    torch.testing.assert_close(graph.x[4:, 0], expected)


@pytest.mark.parametrize(
    ("people", "friends", "said"),
    [
        (PEOPLE, FRIENDS, "run"),
        ({"anna": PEOPLE["anna"]} | NEW, [("eva", "anna")], "'bert'"),
        (PEOPLE | {"eva": ("cow", "test", 1, 1)}, FRIENDS, "'cow'"),
    ],
)
def test_a_graph_that_is_no_grown_one_is_refused(
    people: dict[str, Any], friends: list[tuple[str, str]], said: str, tmp_path: Path
) -> None:
    file = tables(tmp_path / "grown", people, friends)
    with pytest.raises(DataError, match=said):
        users_graph(config_of(tmp_path, f"data.add={file}"))


def test_who_left_may_be_missing_and_must_have_been_there(tmp_path: Path) -> None:
    stay = {name: one for name, one in PEOPLE.items() if name != "bert"}
    file = tables(tmp_path / "grown", stay | NEW, [("eva", "anna"), ("cora", "dora")])
    config = config_of(tmp_path, f"data.add={file}", "data.remove=[bert]")
    graph = users_graph(config)
    assert graph.names is not None and graph.names[:4] == tuple(PEOPLE)
    assert users_left(config, graph) == [1]
    with pytest.raises(ConfigError, match="'zoe'"):
        users_left(config_of(tmp_path, "data.remove=[zoe]"), graph)


def save(data: Data, path: Path) -> None:
    torch.save(dict(data.to_dict()), path)


def test_without_names_old_users_come_first(tmp_path: Path) -> None:
    whole = small_graph(24)
    save(whole.subgraph(torch.arange(18)), tmp_path / "old.pt")
    save(whole, tmp_path / "whole.pt")

    def config(file: str) -> Any:
        words = [f"data.name={tmp_path / 'old.pt'}", f"data.add={tmp_path / file}"]
        return load_config("nfedgnn/own-graph", words)

    def grown(file: str) -> Any:
        return users_graph(config(file))

    graph, users = grown("whole.pt"), []
    for part in range(5):  # old users in ranges, newcomers in turn: nobody moves as more come
        place = {"partition-id": part, "num-partitions": 5}
        _, here = hosted_users(config("whole.pt"), Context(1, part, place, RecordDict(), {}))
        users.append(here.tolist())
    assert sorted(user for local in users for user in local) == list(range(24))
    assert [local[-2:] for local in users[:2]] == [[18, 23], [6, 19]]
    assert graph.num_nodes == 24 and torch.equal(graph.test_mask, whole.test_mask)
    whole.x = whole.x.flip(0)
    save(whole, tmp_path / "other.pt")
    with pytest.raises(DataError, match="node 0"):
        grown("other.pt")
    with pytest.raises(DataError):
        grown("none.pt")


ALONE = "strategy.share=own"  # newcomers may train alone at first
RAY = (pytest.mark.release, pytest.mark.timeout(1500))  # three runs, on a busy machine


@pytest.mark.parametrize("engine", ["in-process", pytest.param("flwr", marks=RAY, id="on_ray")])
def test_a_run_is_gone_on_with_by_the_command_line(
    engine: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Twice: newcomers come and train alone, then one leaves."""
    monkeypatch.chdir(tmp_path)
    file = tables(tmp_path / "grown", PEOPLE | NEW, FRIENDS + NEW_FRIENDS)
    first = tables(tmp_path / "first", PEOPLE, FRIENDS)
    words = [f"data.name={first}", "rounds=3", "checkpoint_every=1", ALONE, "--out", "out"]
    where = ["--supernodes", "2", "--engine", engine]
    assert main(["run", "nfedgnn/own-graph", *words, "--quiet", *where]) == 0
    again = ["run", "--resume", "out", "--quiet", *where]
    grown = [f"data.add={Path(file).name}", "strategy.newcomers_alone=2", "rounds=6"]
    assert main([*again, *grown]) == 0
    lines = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert [line["answered"] for line in lines] == [4, 4, 4, 2, 2, 6]
    assert main([*again, "data.remove=[eva]", "rounds=7"]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["clients"] == 5
    for server_round in checkpoint.complete_rounds(tmp_path / "out" / "checkpoints"):
        state = checkpoint.load_server(tmp_path / "out" / "checkpoints", server_round)
        assert not state["server"]["latent"][4].any()


def test_newcomers_of_a_deployment_connect_with_folders_of_their_own(tmp_path: Path) -> None:
    whole, words = small_graph(12), [f"data.name={tmp_path / 'old.pt'}", ALONE]
    save(whole.subgraph(torch.arange(9)), tmp_path / "old.pt")
    save(whole, tmp_path / "whole.pt")
    more = [f"data.add={tmp_path / 'whole.pt'}", "strategy.newcomers_alone=2"]
    for out, said, count in (("old", [], 3), ("now", more, 12)):
        given = ["partition", "nfedgnn/own-graph", *words, *said, "--supernodes", str(count)]
        assert main([*given, "--out", str(tmp_path / out)]) == 0
    for file in tmp_path.glob("*.pt"):
        file.unlink()  # nobody reads it any more

    def go_on(rounds: int, said: list[str], server: str, folders: list[Path]) -> list[int]:
        settings = [*words, *said, f"rounds={rounds}", "checkpoint_every=1"]
        config = load_config("nfedgnn/own-graph", settings)
        places = [
            {"data-folder": str(folder), "state-dir": str(tmp_path / "state" / folder.name)}
            for folder in folders
        ]
        app = client_app(config, None)
        grid = InProcessGrid(app, num_supernodes=len(folders), node_config=places)
        reports: list[Any] = []
        run_server(
            config,
            grid,
            tmp_path / "out",
            engine="in-process",
            resume=bool(said),
            on_round=reports.append,
            folder=server_folder(config, str(tmp_path / server / "server")),
        )
        return [report.answered for report in reports]

    old = sorted((tmp_path / "old").glob("client*"))
    new = sorted((tmp_path / "now").glob("client*"))[9:]
    assert (len(old), len(new)) == (3, 3)
    assert go_on(2, [], "old", old) == [9, 9]
    assert go_on(6, more, "now", [*old, *new]) == [3, 3, 12, 12]
