"""What a graph may be: each row of ``docs/own-data.md`` through each door, with the exact words."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from flower_graph.config.common import DataConfig
from flower_graph.data import as_graph, description, load_graph
from flower_graph.data.checked import check_clients, check_rows, server_graph
from flower_graph.data.features import prepare_features
from flower_graph.data.folders.client_folder import client_graph_from_data, load_folder
from flower_graph.errors import ConfigError, DataError
from flower_graph.method.load import load_config

DOCS = Path(__file__).parents[2] / "docs/own-data.md"
FILE, FOLDER, PYTHON, CLIENT, SERVER = "file", "folder", "python", "client", "server"
RATIOS = [0.5, 0.25, 0.25]


def mask(*nodes: int) -> torch.Tensor:
    result = torch.zeros(6, dtype=torch.bool)
    result[list(nodes)] = True
    return result


PAIRS = torch.tensor([[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]])  # a triangle; 3, 4 and 5 alone
X = torch.tensor([[1.0, 0], [0, 2], [3, 0], [0, 4], [5, 0], [0, 6]])
PLAIN: dict[str, Any] = {
    "x": X,
    "edge_index": PAIRS,
    "y": torch.tensor([0, 1, 0, 1, 0, 1]),
    "train_mask": mask(0, 1),
    "val_mask": mask(2, 3),
    "test_mask": mask(4),
}
NO_MASKS = {"train_mask": None, "val_mask": None, "test_mask": None}


@dataclass
class Case:
    """A row of the documentation's table, what is given, and what the doors say of it."""

    row: str
    changes: dict[str, Any]
    note: str = ""  # what is said where it is taken; "": nothing
    error: str = ""  # what is said where it is refused
    # Doors that say something else: a note, or an error that begins with "!"; None: no such door
    other: dict[str, str | None] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)


# The server's constructor looks at no features, and a client alone knows of no other's classes.
NO_X = {SERVER: ""}
ROWS = [
    Case("labels: whole numbers of any width", {"y": PLAIN["y"].to(torch.int16)}),
    Case(
        "labels: below 0",
        {"y": torch.tensor([0, 1, 0, 1, 0, -1])},
        "1 of 6 nodes without a label",
        other={FOLDER: "1 of 12 nodes without a label", CLIENT: "", SERVER: ""},
    ),
    Case(
        "labels: floats",
        {"y": torch.tensor([0.0, 1, 0, 1, 0, torch.nan])},
        "labels of float32 taken as whole numbers",
    ),
    Case(
        "labels: with gaps",
        {"y": torch.tensor([0, 5, 0, 5, 0, 100])},
        "labels 0, 5, 100 taken as 3 classes",
        other={FOLDER: "labels 0, 1, 5, 100 taken as 4 classes", CLIENT: "", SERVER: ""},
    ),
    Case(
        "labels: words",
        {"y": ["cat", "dog", "cat", "dog", "cat", None]},
        "labels cat, dog taken as 2 classes",
        other={
            FOLDER: "labels 0, 1, cat, dog taken as 4 classes",
            CLIENT: "!y has 'cat': must be numbers of classes, the same at all clients",
            SERVER: "!y has words: flower_graph.data.as_graph(data) makes classes of them",
        },
    ),
    Case("labels: `num_classes`", {"num_classes": 7}),
    Case(
        "labels: `num_classes`",
        {"num_classes": 1},
        error="y[1] is 1: labels must be 0 to 0, by num_classes = 1, or -1 for none",
        other={CLIENT: "", SERVER: ""},
    ),
    Case(
        "labels: half numbers",
        {"y": torch.tensor([0.0, 1, 0.5, 1, 0, 1])},
        error="y[2] is 0.5: labels must be whole numbers, one class a node (regression is not "
        "supported); y.long() rounds towards 0",
    ),
    Case(
        "labels: several a node",
        {"y": torch.zeros(6, 3, dtype=torch.int64)},
        error="y is torch.int64 [6, 3]: must be one class a node (several labels a node, and "
        "regression, are not supported; of one-hot rows y.argmax(1) is that)",
    ),
    Case(
        "labels: more or fewer than nodes",
        {"y": torch.tensor([0, 1])},
        error="y is torch.int64 [2]: must be int64 [6], one class for each row of x",
        other={SERVER: "!edge_index[0, 4] is 2: must be 0 to 1"},
    ),
    Case(
        "labels: none at all",
        {"y": torch.full((6,), -1), **NO_MASKS},
        error="y: no node has a label",
        other={
            FOLDER: "!client 1 cannot be split (nodes: 6, with a label: 0): partition.ratios = "
            "[0.5, 0.25, 0.25] must leave at least one in each of three parts",
            CLIENT: "!client 0 cannot be split (nodes: 6, with a label: 0): partition.ratios = "
            "[0.5, 0.25, 0.25] must leave at least one in each of three parts",
            SERVER: "",
        },
    ),
    Case(
        "masks: none",
        NO_MASKS,
        "",
        other={FILE: "no masks: 60/20/20 % of the labelled nodes drawn with seed 0"},
    ),
    Case(
        "masks: 0 and 1",
        {"train_mask": mask(0, 1).to(torch.uint8)},
        "train_mask of uint8 taken as true and false",
    ),
    Case("masks: lists", {"train_mask": mask(0, 1).tolist()}),
    Case(
        "masks: numbers of nodes",
        {"train_mask": torch.tensor([0, 1])},
        error="train_mask is torch.int64 [2]: must be bool [6]; of numbers of nodes, mask = "
        "torch.zeros(6, dtype=bool), mask[numbers] = True",
    ),
    Case(
        "masks: a node without a label",
        {"y": torch.tensor([0, -1, 0, 1, 0, 1])},
        error="train_mask: node 1 has no label, as 1 of its nodes: take them out of it, such as by "
        "train_mask &= y >= 0",
        other={PYTHON: "1 of 6 nodes without a label"},  # said once masks are used
    ),
    Case(
        "masks: a node in two",
        {"test_mask": mask(1, 4)},
        error="train_mask and test_mask overlap in 1 nodes, the first is node 1",
        other={PYTHON: ""},
    ),
    Case(
        "masks: some of the three",
        {"val_mask": None},
        "",
        other={
            FILE: "!has train_mask, test_mask, but not val_mask: give it all three, or set "
            "data.split=random, which draws all of them"
        },
    ),
    Case(
        "masks: several splits, `[n, k]`",
        {part: torch.stack([PLAIN[part]] * 3, 1) for part in NO_MASKS},
        "",
        other={
            FOLDER: "!train_mask is [6, 3]: must be bool [6]",
            CLIENT: "!train_mask is [6, 3]: must be bool [6]",
            SERVER: "!train_mask is of 3 splits: must be bool [n]",
        },
    ),
    Case("edges: both directions", {"edge_index": PAIRS[:, torch.tensor([5, 1, 0, 3, 2, 4])]}),
    Case(
        "edges: one direction",
        {"edge_index": torch.tensor([[0, 0, 1], [1, 2, 2]])},
        "edges in one direction: both made",
    ),
    Case(
        "edges: one direction",
        {"edge_index": PAIRS[:, :5]},
        "1 edges in one direction: both made",
    ),
    Case(
        "edges: more than once",
        {"edge_index": torch.cat([PAIRS, PAIRS[:, :2]], 1)},
        "2 edges given more than once: taken once",
    ),
    Case(
        "edges: self-loops",
        {"edge_index": torch.cat([PAIRS, torch.tensor([[4], [4]])], 1)},
        "1 self-loops left out",
    ),
    Case("edges: int32", {"edge_index": PAIRS.int()}),
    Case(
        "edges: to nodes that are not there",
        {"edge_index": torch.tensor([[0, 1], [1, 6]])},
        error="edge_index[1, 1] is 6: must be 0 to 5",
    ),
    Case(
        "edges: as `[E, 2]`, or floats",
        {"edge_index": PAIRS.t()},
        error="edge_index is torch.int64 [6, 2]: must be int64 [2, E]; edge_index.t() would be",
    ),
    Case(
        "edges: as `[E, 2]`, or floats",
        {"edge_index": PAIRS.float()},
        error="edge_index is torch.float32 [2, 6]: must be int64 [2, E]; edge_index.long() would "
        "be",
    ),
    Case(
        "edges: none",
        {"edge_index": None},
        error="the graph has no edge_index",
        other={FOLDER: "", CLIENT: ""},  # a graphless client
    ),
    Case("features: float32", {}),
    Case(
        "features: other numbers",
        {"x": X.double()},
        "features of float64 taken as float32",
        other=NO_X,
    ),
    Case(
        "features: other numbers",
        {"x": X.bfloat16()},
        "features of bfloat16 taken as float32",
        other=NO_X,
    ),
    Case(
        "features: other numbers", {"x": X.bool()}, "features of bool taken as float32", other=NO_X
    ),
    Case("features: sparse", {"x": X.to_sparse_coo()}, "sparse_coo features made dense",
         other=NO_X),
    Case("features: sparse", {"x": X.to_sparse_csr()}, "sparse_csr features made dense",
         other=NO_X),
    Case(
        "features: not finite",
        {"x": torch.where(X == 3, torch.nan, X)},
        error="x[2, 0] is nan: must be finite, below 3e38",
        other=NO_X,
    ),
    Case(
        "features: not finite",
        {"x": torch.where(X == 3, 1e300, X.double())},
        error="x[2, 0] is 1e+300: must be finite, below 3e38",
        other=NO_X,
    ),
    Case(
        "features: `[n]`",
        {"x": X[:, 0]},
        error="x has shape [6]: must be [nodes, features]; x.view(-1, 1) has one feature",
        other=NO_X,
    ),
    Case(
        "features: none",
        {"x": None},
        error="the graph has no x: set data.no_features=degree or one-hot (as_graph's "
        "no_features), or give it features [nodes, features]",
        other=NO_X,
    ),
    Case(
        "features: none",
        {"x": None},
        "no features: each node's degree stands for them, 0 to 31 or more",
        other={FOLDER: None, CLIENT: None, SERVER: ""},
        options={"no_features": "degree"},
    ),
    Case(
        "features: none",
        {"x": None},
        "no features: each node's number stands for them, one of as many as nodes",
        other={FOLDER: None, CLIENT: None, SERVER: ""},
        options={"no_features": "one-hot"},
    ),
    Case("names", {"names": list("abcdef")}),
    Case(
        "names",
        {"names": list("abcdeb")},
        error="the name 'b' is there twice: nodes 1 and 5",
        other={SERVER: ""},
    ),
]  # fmt: skip


def through_file(content: dict[str, Any], folder: Path, **options: str) -> None:
    torch.save(content, folder / "graph.pt")
    config = DataConfig(name=str(folder / "graph.pt"), split="auto", features="as-is", **options)
    load_graph(config)


def through_folder(content: dict[str, Any], folder: Path, **options: str) -> None:
    torch.save(Data(**PLAIN), folder / "a.pt")
    torch.save(content, folder / "b.pt")
    load_folder(folder, RATIOS, seed=0)


def through_python(content: dict[str, Any], folder: Path, **options: str) -> None:
    graph = as_graph(SimpleNamespace(**content), **options)
    description.tell("python", graph.notes)


def through_client(content: dict[str, Any], folder: Path, **options: str) -> None:
    client_graph_from_data(0, SimpleNamespace(**content), ratios=RATIOS)


def through_server(content: dict[str, Any], folder: Path, **options: str) -> None:
    server_graph(SimpleNamespace(**content))


DOORS: dict[str, tuple[Callable[..., None], str]] = {
    FILE: (through_file, r"(file|data) .*graph\.pt: "),
    FOLDER: (through_folder, r"(file .*b\.pt|folder .*|client 1): "),
    PYTHON: (through_python, ""),
    CLIENT: (through_client, "(client 0: )?"),
    SERVER: (through_server, ""),
}


@pytest.fixture(autouse=True)
def _nothing_said_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(description, "_said", set())
    yield


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.row)
def test_each_row_through_each_door(
    case: Case, door: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = {key: value for key, value in {**PLAIN, **case.changes}.items() if value is not None}
    words = case.other.get(door, f"!{case.error}" if case.error else case.note)
    if words is None:
        return
    enter, place = DOORS[door]
    caplog.set_level(logging.INFO, "flower_graph.data")
    if words.startswith("!"):
        with pytest.raises(DataError) as caught:
            enter(content, tmp_path, **case.options)
        text = str(caught.value)
        assert re.match(place, text) and words[1:] in text and "\n" not in text
        return
    enter(content, tmp_path, **case.options)
    said = [record.getMessage() for record in caplog.records]
    assert all(record.name == "flower_graph.data" for record in caplog.records)
    assert any(one.endswith(words) for one in said) if words else len(said) <= (door == FOLDER), (
        said
    )


WEIRD: list[Any] = [
    5, 2.5, "abc", {"a": 1}, [], [[1, 2], [3]], ["a", None, 3], object(), torch.tensor(3), True,
    torch.tensor([1.5, torch.inf, torch.nan]), torch.zeros(0, 3), torch.zeros(2, 3, 4),
    torch.zeros(6, dtype=torch.complex64), torch.eye(6).to_sparse_coo(), PAIRS.float(),
    torch.tensor([2**62, -5, 0]), np.array([1, 2, 3], dtype=np.uint64), np.array(["a", "b", "c"]),
    np.array([1, None, 3], dtype=object), range(3), [1, 2, 10**30],
    torch.quantize_per_tensor(torch.ones(6), 1.0, 0, torch.quint8),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", [*PLAIN, "names", "classes", "num_classes"])
def test_whatever_is_given_is_taken_or_refused_in_one_line(key: str) -> None:
    for value in WEIRD:
        for enter in (through_python, through_client, through_server):
            try:
                enter({**PLAIN, key: value}, Path())
            except DataError as error:
                assert "\n" not in str(error)


def test_numbers_of_nodes_are_no_features_of_several_clients(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.no_features='one-hot'.*data\.no_features=deg"):
        load_folder(tmp_path, RATIOS, seed=0, no_features="one-hot")
    for name in "ab":
        torch.save({**PLAIN, "x": None}, tmp_path / f"{name}.pt")
    first, _ = load_folder(tmp_path, RATIOS, seed=0, no_features="degree")
    assert first.x.argmax(1).tolist() == [2, 2, 2, 0, 0, 0]
    assert first.x.sum(1).tolist() == [1.0] * 6 and first.x.shape == (6, 32)


def test_the_documentation_has_these_rows() -> None:
    section = DOCS.read_text(encoding="utf-8").split("## What a graph may be")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\w.*?) \|", section, re.MULTILINE)
    assert rows[1:] == [*dict.fromkeys(case.row for case in ROWS), "features: at a run"]


# What is done to labels ---------------------------------------------------------------------------


def test_classes_keep_their_names_and_an_order() -> None:
    graph = as_graph(SimpleNamespace(**PLAIN | {"y": torch.tensor([7, 100, -3, 7, 9, 100])}))
    assert (graph.y.tolist(), graph.num_classes) == ([0, 2, -1, 0, 1, 2], 3)
    assert graph.classes == ("7", "9", "100")
    again = as_graph(graph.to_data())
    assert (again.y.tolist(), again.classes) == (graph.y.tolist(), graph.classes)
    words = as_graph(SimpleNamespace(**PLAIN | {"y": ["b", "a", "", "b", "a", "c"]}))
    assert (words.y.tolist(), words.classes) == ([1, 0, -1, 1, 0, 2], ("a", "b", "c"))
    numbers = as_graph(SimpleNamespace(**PLAIN | {"y": ["10", "2", "-1", "2", "2", "2"]}))
    assert (numbers.y.tolist(), numbers.classes) == ([1, 0, -1, 0, 0, 0], ("2", "10"))


def test_a_thousand_classes_at_most_unless_the_graph_says_so() -> None:
    many = {"x": torch.ones(1001, 1), "y": torch.arange(1001) * 10**12, "edge_index": PAIRS}
    with pytest.raises(DataError, match=r"1001.*labels.*1000"):
        as_graph(SimpleNamespace(**many))
    declared = as_graph(SimpleNamespace(**many | {"y": torch.arange(1001), "num_classes": 1001}))
    assert declared.num_classes == 1001


def test_clients_of_a_folder_have_common_classes(tmp_path: Path) -> None:
    torch.save(PLAIN | {"y": torch.tensor([3, 3, 5, 5, 3, 3])}, tmp_path / "a.pt")
    torch.save(PLAIN | {"y": torch.tensor([5, 9, 9, 5, 9, -1])}, tmp_path / "b.pt")
    clients = load_folder(tmp_path, RATIOS, seed=0)
    assert (clients.num_classes, clients.classes) == (3, ("3", "5", "9"))
    assert [one.y.tolist() for one in clients] == [[0, 0, 1, 1, 0, 0], [1, 2, 2, 1, 2, -1]]


def test_a_drawn_split_is_of_labelled_nodes_alone(tmp_path: Path) -> None:
    y = torch.arange(100) % 3
    y[::2] = -1
    edges = torch.stack([torch.arange(99), torch.arange(1, 100)])
    torch.save({"x": torch.eye(100), "y": y, "edge_index": edges}, tmp_path / "graph.pt")
    for split in ({"split": "auto"}, {"split": "random", "ratios": [0.6, 0.2, 0.2]}):
        graph = load_graph(DataConfig(name=str(tmp_path / "graph.pt"), **split))
        masks = torch.stack([graph.train_mask, graph.val_mask, graph.test_mask])
        assert masks.sum(1).tolist() == [30, 10, 10]
        assert (graph.y[masks.any(0)] >= 0).all()


# What is done to features -------------------------------------------------------------------------

SPARSE_COUNTS = torch.tensor([[2.0, 0, 0, 0], [0, 6, 0, 0], [0, 0, 0, 0], [3, 0, 0, 1]])
DENSE = torch.tensor([[1.0, 2], [3, 4]])
SIGNED = torch.tensor([[0.0, -1], [0, 0], [0, 0]])


@pytest.mark.parametrize(
    ("x", "how", "wanted", "notes"),
    [
        (DENSE, "as-is", DENSE, []),
        (
            DENSE,
            "row",
            DENSE / torch.tensor([[3.0], [7.0]]),
            ["features row-normalised; before: largest value 4, 100 % of the entries non-zero"],
        ),
        (
            SPARSE_COUNTS,
            "presence",
            (SPARSE_COUNTS != 0).float(),
            ["features made 0 or 1; before: largest value 6, 25 % of the entries non-zero"],
        ),
        (
            SPARSE_COUNTS,
            "presence-row",
            torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0.5, 0, 0, 0.5]]),
            [
                "features made 0 or 1; before: largest value 6, 25 % of the entries non-zero",
                "features row-normalised; before: largest value 6, 25 % of the entries non-zero",
            ],
        ),
        (
            DENSE,
            "standardise",
            torch.tensor([[-1.0, -1], [1, 1]]),
            [
                "features standardised over all nodes; before: "
                "largest value 4, 100 % of the entries non-zero"
            ],
        ),
        (
            torch.tensor([[5.0, 1], [5, 3]]),
            "standardise",
            torch.tensor([[0.0, -1], [0, 1]]),
            [
                "features standardised over all nodes; before: "
                "largest value 5, 100 % of the entries non-zero; "
                "1 constant"
            ],
        ),
        (
            torch.eye(2),
            "auto",
            torch.eye(2),
            [
                "data.features=auto chose as-is: all entries are 0 or 1",
            ],
        ),
        (
            DENSE,
            "auto",
            torch.tensor([[-1.0, -1], [1, 1]]),
            [
                "data.features=auto chose standardise: more than a third of the entries are not 0",
                "features standardised over all nodes; before: "
                "largest value 4, 100 % of the entries non-zero",
            ],
        ),
    ],
)
def test_what_is_done_to_features_is_said(
    x: torch.Tensor, how: str, wanted: torch.Tensor, notes: list[str]
) -> None:
    (found,), said, _ = prepare_features([x], how)
    torch.testing.assert_close(found, wanted)
    assert list(said) == notes


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        (torch.eye(3), ("as-is", "as-is")),
        (SPARSE_COUNTS, ("presence", "standardise")),
        (SIGNED, ("standardise", "standardise")),
    ],
)
@pytest.mark.parametrize("how", ["auto", "auto-dense"])
def test_auto_looks_at_signs_and_zeros(
    x: torch.Tensor, wanted: tuple[str, str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = wanted[how == "auto-dense"]
    (found,), (chosen, *_), treatment = prepare_features([x], how)
    assert chosen.startswith(f"data.features={how} chose {form}: ")
    # New graphs are treated alike
    torch.testing.assert_close(treatment.apply(x), found)
    torch.testing.assert_close(found, prepare_features([x], form).features[0])
    monkeypatch.setattr("flower_graph.data.features.MOST_DENSE", 1)
    assert f"chose {wanted[0]}: " in prepare_features([x], how).notes[0]


@pytest.mark.parametrize(("x", "why"), [(DENSE, "dense"), (SIGNED, "negative")])
def test_presence_does_not_destroy_values(x: torch.Tensor, why: str) -> None:
    for how in ("presence", "presence-row"):
        with pytest.raises(DataError, match=rf"{why}.*data\.features=as-is"):
            prepare_features([x], how)
    ones = torch.tensor([[1.0, 1], [1, 0]])  # 0 or 1 already: nothing is lost
    assert torch.equal(prepare_features([ones], "presence")[0][0], ones)


def test_clients_are_standardised_together() -> None:
    left, right = prepare_features([DENSE[:1], DENSE[1:]], "standardise")[0]
    assert (left.tolist(), right.tolist()) == ([[-1.0, -1.0]], [[1.0, 1.0]])


def test_features_alike_by_what_was_done_to_them_are_said_to_be(tmp_path: Path) -> None:
    x = torch.tensor([[0.0, 0, float(row + 1)] for row in range(6)])
    for name in "ab":
        content = {key: value for key, value in PLAIN.items() if key != "edge_index"}
        torch.save(content | {"x": x}, tmp_path / f"{name}.pt")
    assert len(load_folder(tmp_path, RATIOS, seed=0)) == 2
    with pytest.raises(DataError) as caught:
        load_folder(tmp_path, RATIOS, seed=0, features="presence")
    assert str(caught.value).endswith(
        "client 0: it has no edges, and all its 6 nodes have the same features once they are made "
        "0 or 1 (data.features=as-is leaves them): no graph can be learnt"
    )


def test_an_unknown_form_of_features_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^data\.features.*row"):
        load_config("fedgls/cora", ["data.features=rows"])


# Constructors -------------------------------------------------------------------------------------


def client(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"client": 9, **PLAIN, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.where(X == 3, torch.inf, X)}, "x[2, 0] is inf: must be finite"),
        ({"x": X.double()}, "x is torch.float64 [6, 2] (torch.strided): must be float32"),
        ({"y": PLAIN["y"].float()}, "y is torch.float32 [6]: must be int64 [6], -1 without"),
        ({"edge_index": PAIRS + 4}, "edge_index[0, 4] is 6: must be 0 to 5"),
        ({"edge_index": PAIRS[:, :1]}, "edge_index has not every edge once in both directions"),
        ({"train_mask": mask(0)[:5]}, "train_mask is torch.bool [5]: must be bool [6]"),
        ({"y": torch.full((6,), -1)}, "train_mask: node 0 has no label, as 2 of its nodes"),
        ({"val_mask": mask(0)}, "train_mask and val_mask overlap in 1 nodes, the first is node 0"),
    ],
)
def test_constructors_name_the_client(changes: dict[str, Any], words: str) -> None:
    check_clients([client(), client(edge_index=None), client(x=X.to_sparse_csr())])
    with pytest.raises(DataError) as caught:
        check_clients([client(), client(**changes)])
    assert str(caught.value).startswith(f"client 9: {words}")


@pytest.mark.parametrize(
    "kind", [Tensor.tolist, Tensor.numpy, Tensor.int, Tensor.clone], ids=lambda kind: kind.__name__
)
def test_a_server_takes_edges_of_any_kind_in_the_order_that_they_have(
    kind: Callable[[Tensor], Any],
) -> None:
    turned = torch.tensor([[1, 0, 2, 1], [0, 1, 1, 2]])
    given = SimpleNamespace(edge_index=kind(turned), y=[0, 1, 0], train_mask=[True, True, False])
    edges = server_graph(given).edge_index
    assert edges.dtype == torch.int64 and torch.equal(edges, turned)


def test_what_was_found_fit_is_looked_at_once_until_it_is_written_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.rand(6, 2)
    check_rows(x[1:4])
    monkeypatch.setattr(torch, "isfinite", lambda _: pytest.fail("looked at again"))
    check_rows(x[1:4])
    monkeypatch.undo()
    x[2, 0] = torch.nan
    with pytest.raises(DataError, match=r"x\[1, 0\].*nan"):
        check_rows(x[1:4])
