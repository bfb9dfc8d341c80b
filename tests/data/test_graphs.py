"""What a graph may be: each row of ``docs/reference/configuration.md`` once, and each door once."""

import logging
import re
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federation import COMPARED, METHODS, Setup
from hypothesis import given
from hypothesis import strategies as st
from own_graphs import valued
from partition_helpers import mask
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, remove_self_loops
from torch_geometric.utils import to_undirected as pyg_to_undirected

import flower_graph as fg
from flower_graph.client.learner import LinkTask, placed_on
from flower_graph.config.common import DataConfig, PartitionSection
from flower_graph.data import as_graph, description, load_graph
from flower_graph.data.description import Caution, check_clients, read_features, server_graph
from flower_graph.data.features import ReadOptions, prepare_features
from flower_graph.data.folders.client_folder import client_graph_from_data, load_folder
from flower_graph.data.graph import ClientGraph, check_dense_size, take_rows, to_undirected
from flower_graph.data.partition.client_graphs import partition_graph
from flower_graph.errors import DataError
from flower_graph.method.registry import method_of

DOCS = Path(__file__).parents[2] / "docs/reference/configuration.md"
FILE, FOLDER, PYTHON, CLIENT, SERVER = "file", "folder", "python", "client", "server"
RATIOS = [0.5, 0.25, 0.25]
SPLIT = PartitionSection(ratios=RATIOS)


PAIRS = torch.tensor([[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]])  # a triangle; 3, 4 and 5 alone
ADJACENCY = torch.sparse_coo_tensor(PAIRS.flip(0), torch.ones(6), (6, 6))
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


# A row of the documentation's table, what is given, and what is said: a note, or where `!` begins
# it the key or value that the refusal names. The door is one that says it.
Row = tuple[str, dict[str, Any], str]
ROWS: list[Row] = [
    ("labels: whole numbers of any width", {"y": PLAIN["y"].to(torch.int16)}, ""),
    ("labels: whole numbers of any width", {"y": PLAIN["y"][:, None]}, ""),
    ("labels: below 0", {"y": torch.tensor([0, 1, 0, 1, 0, -1])}, "1 of 6 nodes"),
    ("labels: floats", {"y": torch.tensor([0.0, 1, 0, 1, 0, torch.nan])}, "float32"),
    ("labels: with gaps", {"y": torch.tensor([0, 5, 0, 5, 0, 100])}, "labels 0, 5, 100"),
    ("labels: words", {"y": ["cat", "dog", "cat", "dog", "cat", None]}, "labels cat, dog"),
    ("labels: `num_classes`", {"num_classes": 7}, ""),
    ("labels: `num_classes`", {"num_classes": torch.tensor(7)}, ""),
    ("labels: `num_classes`", {"num_classes": 1}, "!num_classes = 1"),
    ("labels: half numbers", {"y": torch.tensor([0.0, 1, 0.5, 1, 0, 1])}, "!y[2] is 0.5"),
    ("labels: half numbers", {"y": torch.tensor([0.0, 1, 0, 1, 0, 1e17])}, "!y[5] is 9.9"),
    ("labels: several a node", {"y": torch.zeros(6, 3, dtype=torch.int64)}, "!y is torch.int64"),
    ("labels: more or fewer than nodes", {"y": torch.tensor([0, 1])}, "!y is torch.int64 [2]"),
    ("labels: none at all", {"y": torch.full((6,), -1), **NO_MASKS}, "!y: "),
    ("masks: none", NO_MASKS, "60/20/20"),
    ("masks: 0 and 1", {"train_mask": mask(0, 1).to(torch.uint8)}, "train_mask of torch.uint8"),
    ("masks: lists", {"train_mask": mask(0, 1).tolist()}, ""),
    ("masks: numbers of nodes", {"train_mask": torch.tensor([0, 1])}, "!train_mask is torch.int64"),
    ("masks: a node without a label",
     {"y": torch.tensor([0, -1, 0, 1, 0, 1])}, "!train_mask: node 1"),
    ("masks: a node in two", {"test_mask": mask(1, 4)}, "!train_mask and test_mask"),
    ("masks: some of the three", {"val_mask": None}, "!val_mask"),
    ("masks: several splits, `[n, k]`",
     {part: torch.stack([PLAIN[part]] * 3, 1) for part in NO_MASKS}, ""),
    ("edges: both directions", {"edge_index": PAIRS[:, torch.tensor([5, 1, 0, 3, 2, 4])]}, ""),
    ("edges: one direction",
     {"edge_index": torch.tensor([[0, 0, 1], [1, 2, 2]])}, "in one direction"),
    ("edges: one direction", {"edge_index": PAIRS[:, :5]}, "1 edges in one direction"),
    ("edges: more than once", {"edge_index": torch.cat([PAIRS, PAIRS[:, :2]], 1)}, "2 edges"),
    ("edges: self-loops",
     {"edge_index": torch.cat([PAIRS, torch.tensor([[4], [4]])], 1)}, "1 self-loops"),
    ("edges: int32", {"edge_index": PAIRS.int()}, ""),
    ("edges: int32", {"edge_index": PAIRS.tolist()}, ""),
    ("edges: `adj_t`", {"edge_index": None, "adj_t": ADJACENCY}, ""),
    ("edges: to nodes that are not there",
     {"edge_index": torch.tensor([[0, 1], [1, 6]])}, "!edge_index[1, 1] is 6"),
    ("edges: as `[E, 2]`, or floats", {"edge_index": PAIRS.t()}, "!torch.int64"),
    ("edges: as `[E, 2]`, or floats", {"edge_index": PAIRS.float()}, "!torch.float32"),
    ("edges: none", {"edge_index": None}, "!edge_index"),
    ("features: float32", {}, ""),
    ("features: other numbers", {"x": X.double()}, "features of torch.float64"),
    ("features: other numbers", {"x": X.bfloat16()}, "of torch.bfloat16"),
    ("features: other numbers", {"x": X.bool()}, "of torch.bool"),
    ("features: sparse", {"x": X.to_sparse_coo()}, "sparse_coo"),
    ("features: sparse", {"x": X.to_sparse_csr()}, "sparse_csr"),
    ("features: not finite", {"x": torch.where(X == 3, torch.nan, X)}, "!x[2, 0] is nan"),
    ("features: not finite", {"x": torch.where(X == 3, 1e300, X.double())}, "!x[2, 0] is 1e+300"),
    ("features: `[n]`", {"x": X[:, 0]}, "!x is torch.float32 [6]"),
    ("features: none", {"x": None}, "!data.no_features"),
    ("features: none", {"x": None, "no_features": "degree"}, "degree"),
    ("features: none", {"x": None, "no_features": "one-hot"}, "number"),
    ("names", {"names": list("abcdef")}, ""),
    ("names", {"names": list("abcdeb")}, "!'b' 2 times"),
]  # fmt: skip
# What one door says and the file's does not: what else it wants, or how much it leaves open
OTHERWISE: list[tuple[str, dict[str, Any], str]] = [
    (FOLDER, {"y": torch.tensor([0, 5, 0, 5, 0, 100])}, "labels 0, 1, 5, 100"),
    (FOLDER, {"y": torch.full((6,), -1), **NO_MASKS}, ""),  # it takes part with weight 0
    (FOLDER, {"train_mask": torch.stack([mask(0)] * 3, 1)}, "!train_mask is [6, 3]"),
    (FOLDER, {"edge_index": None}, ""),  # a graphless client
    (PYTHON, {"val_mask": None}, ""),
    (PYTHON, {"test_mask": mask(1, 4)}, ""),
    (CLIENT, {"y": ["cat", "dog", "cat", "dog", "cat", None]}, "!y has 'cat'"),
    (CLIENT, {"y": torch.full((6,), -1), **NO_MASKS}, ""),
    (CLIENT, {"y": torch.tensor([0, 5, 0, 5, 0, 100])}, ""),
    (CLIENT, {"edge_index": None}, ""),
    (SERVER, {"y": ["cat", "dog", "cat", "dog", "cat", None]}, "!y has 'cat'"),
    (SERVER, {"edge_index": PAIRS.numpy()}, ""),
    (SERVER, {"y": torch.tensor([0, 1])}, "!edge_index[0, 4] is 2"),
    (SERVER, {"train_mask": torch.stack([mask(0)] * 3, 1)}, "!train_mask is [6, 3]"),
    (SERVER, {"x": torch.where(X == 3, torch.nan, X)}, ""),  # it looks at no features
]
# Each door once: what it notes, and what it refuses
TAKEN = {"edge_index": torch.cat([PAIRS, PAIRS[:, :2]], 1)}, "2 edges"
REFUSED = {"edge_index": torch.tensor([[0, 1], [1, 6]])}, "!edge_index[1, 1] is 6"


def through_file(content: dict[str, Any], folder: Path) -> None:
    torch.save(content, folder / "graph.pt")
    options = {"no_features": content["no_features"]} if "no_features" in content else {}
    load_graph(DataConfig(name=str(folder / "graph.pt"), split="auto", features="as-is", **options))


def through_folder(content: dict[str, Any], folder: Path) -> None:
    torch.save(Data(**PLAIN), folder / "a.pt")
    torch.save(content, folder / "b.pt")
    load_folder(folder, SPLIT, 0)


def through_python(content: dict[str, Any], folder: Path) -> None:
    given = namedtuple("Given", content)(**content)  # without a __dict__
    description.tell("python", as_graph(given).notes)


def through_client(content: dict[str, Any], folder: Path) -> None:
    client_graph_from_data(0, SimpleNamespace(**content), ratios=RATIOS)


def through_server(content: dict[str, Any], folder: Path) -> None:
    server_graph(SimpleNamespace(**content))


DOORS: dict[str, tuple[Callable[..., None], str]] = {
    FILE: (through_file, r"(file|data) .*graph\.pt: "),
    FOLDER: (through_folder, r"(file .*b\.pt|folder .*|client 1): "),
    PYTHON: (through_python, ""),
    CLIENT: (through_client, "(client 0: )?"),
    SERVER: (through_server, ""),
}


@pytest.fixture(autouse=True)
def _nothing_said_before(monkeypatch):
    monkeypatch.setattr(description, "_said", set())
    yield


@pytest.mark.parametrize(
    ("door", "changes", "words"),
    [
        *((FILE, changes, words) for _, changes, words in ROWS),
        *((door, *case) for door in DOORS for case in (TAKEN, REFUSED)),
        *OTHERWISE,
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_graph_is_taken_or_refused_as_its_row_says(door, changes, words, tmp_path, caplog):
    content = {key: value for key, value in {**PLAIN, **changes}.items() if value is not None}
    enter, place = DOORS[door]
    caplog.set_level(logging.INFO, "flower_graph.data")
    if words.startswith("!"):
        with pytest.raises(DataError) as caught:
            enter(content, tmp_path)
        text = str(caught.value)
        assert re.match(place, text) and words[1:] in text and "\n" not in text
        return
    enter(content, tmp_path)
    notes = [record.getMessage() for record in caplog.records]
    assert all(record.name == "flower_graph.data" for record in caplog.records)
    assert any(words in note for note in notes) if words else len(notes) <= (door == FOLDER), notes


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
def test_whatever_is_given_is_taken_or_refused_in_one_line(key):
    for value in WEIRD:
        for enter in (through_python, through_client, through_server):
            try:
                enter({**PLAIN, key: value}, Path())
            except DataError as error:
                assert "\n" not in str(error)


def test_numbers_of_nodes_are_no_features_of_several_clients(tmp_path):
    with pytest.raises(DataError, match=r"data\.no_features='one-hot'.*data\.no_features=deg"):
        load_folder(tmp_path, SPLIT, 0, how=ReadOptions("one-hot"))
    for name in "ab":
        torch.save({**PLAIN, "x": None}, tmp_path / f"{name}.pt")
    first, _ = load_folder(tmp_path, SPLIT, 0, how=ReadOptions("degree"))
    assert first.x.argmax(1).tolist() == [2, 2, 2, 0, 0, 0]
    assert first.x.sum(1).tolist() == [1.0] * 6 and first.x.shape == (6, 32)


def test_the_documentation_has_these_rows():
    section = DOCS.read_text(encoding="utf-8").split("## What a graph may be")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\w.*?) \|", section, re.MULTILINE)
    assert rows[1:] == [*dict.fromkeys(row for row, *_ in ROWS), "features: at a run"]


# What is done to labels ---------------------------------------------------------------------------


def test_classes_keep_their_names_and_an_order(tmp_path):
    graph = as_graph(SimpleNamespace(**PLAIN | {"y": torch.tensor([7, 100, -3, 7, 9, 100])}))
    assert (graph.y.tolist(), graph.num_classes) == ([0, 2, -1, 0, 1, 2], 3)
    again = as_graph(graph.to_data())
    assert (again.y.tolist(), again.classes) == (graph.y.tolist(), ("7", "9", "100"))
    words = as_graph(SimpleNamespace(**PLAIN | {"y": ["b", "a", "", "b", "a", "c"]}))
    assert (words.y.tolist(), words.classes) == ([1, 0, -1, 1, 0, 2], ("a", "b", "c"))
    many = {"x": torch.ones(1001, 1), "y": torch.arange(1001) * 10**12, "edge_index": PAIRS}
    with pytest.raises(DataError, match="1001 labels, at most 1000"):
        as_graph(SimpleNamespace(**many))
    declared = SimpleNamespace(**many | {"y": torch.arange(1001), "num_classes": 1001})
    assert as_graph(declared).num_classes == 1001
    torch.save(PLAIN | {"y": torch.tensor([3, 3, 5, 5, 3, 3])}, tmp_path / "a.pt")
    torch.save(PLAIN | {"y": torch.tensor([5, 9, 9, 5, 9, -1])}, tmp_path / "b.pt")
    clients = load_folder(tmp_path, SPLIT, 0)  # which have their classes in common
    assert (clients.num_classes, clients.classes) == (3, ("3", "5", "9"))
    assert [one.y.tolist() for one in clients] == [[0, 0, 1, 1, 0, 0], [1, 2, 2, 1, 2, -1]]


# What is done to features -------------------------------------------------------------------------

SPARSE_COUNTS = torch.tensor([[2.0, 0, 0, 0], [0, 6, 0, 0], [0, 0, 0, 0], [3, 0, 0, 1]])
DENSE = torch.tensor([[1.0, 2], [3, 4]])
SIGNED = torch.tensor([[0.0, -1], [0, 0], [0, 0]])
MANY_WORDS = (torch.arange(1000).view(2, 500) % 7 == 0).float()  # 71 or 72 ones a node


ENDS = torch.tensor([[-1.0, -1], [1, 1]])
HALVES = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0.75, 0, 0, 0.25]])


CONSTANT, TURNED = torch.tensor([[5.0, 1], [5, 3]]), torch.tensor([[0.0, -1], [0, 1]])
# What each note names: the form, the largest value before, the share that is not 0
CHANGES: list[tuple[Tensor, str, Tensor, list[str]]] = [
    (torch.tensor([[-1.0, 1], [0, 0]]), "row", torch.tensor([[-0.5, 0.5], [0, 0]]), ["row"]),
    (DENSE, "as-is", DENSE, []),
    (DENSE, "row", DENSE / torch.tensor([[3.0], [7.0]]), ["row.* 4, 100 %"]),
    (SPARSE_COUNTS, "presence", (SPARSE_COUNTS != 0).float(), ["0 or 1.* 6, 25 %"]),
    (SPARSE_COUNTS, "row", HALVES, ["row.* 6, 25 %"]),
    (DENSE, "standardise", ENDS, ["standardised.* 4, 100 %"]),
    (CONSTANT, "standardise", TURNED, ["standardised.* 5, 100 %.*1 constant"]),
    (torch.eye(2), "auto", torch.eye(2), ["auto chose as-is"]),
    (DENSE, "auto", ENDS, ["auto chose standardise", "standardised.* 4, 100 %"]),
]


@pytest.mark.parametrize(("x", "how", "wanted", "notes"), CHANGES)
def test_what_is_done_to_features_is_said(x, how, wanted, notes):
    for clients in ([x], [x[:1], x[1:]]):  # clients' features are treated together
        found, said, _ = prepare_features(clients, how)
        torch.testing.assert_close(torch.cat(found), wanted)
        assert all(re.search(note, one) for note, one in zip(notes, said, strict=True)), said


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        (torch.eye(3), ("as-is", "as-is", "as-is")),
        (SPARSE_COUNTS, ("presence", "standardise", "presence")),
        (SIGNED, ("standardise", "standardise", "standardise")),
        (MANY_WORDS, ("standardise", "standardise", "as-is")),
        (2 * MANY_WORDS, ("standardise", "standardise", "presence")),
    ],
)
@pytest.mark.parametrize("how", ["auto", "auto-dense"])
def test_auto_looks_at_signs_and_zeros(x, wanted, how, monkeypatch):
    form = wanted[how == "auto-dense"]
    (found,), (chosen, *_), treatment = prepare_features([x], how)
    assert chosen.startswith(f"data.features={how} chose {form}: ")
    # New graphs are treated alike
    torch.testing.assert_close(treatment.apply(x), found)
    torch.testing.assert_close(found, prepare_features([x], form)[0][0])
    monkeypatch.setattr("flower_graph.data.features.MOST_DENSE", 1)
    assert f"chose {wanted[2]}: " in prepare_features([x], how)[1][0]


def test_presence_does_not_destroy_values():
    for x, why in ((DENSE, "dense"), (SIGNED, "negative")):
        with pytest.raises(DataError, match=rf"{why}.*data\.features=as-is"):
            prepare_features([x], "presence")
    ones = torch.tensor([[1.0, 1], [1, 0]])  # 0 or 1 already: nothing is lost
    assert torch.equal(prepare_features([ones], "presence")[0][0], ones)


def test_features_alike_by_what_was_done_to_them_are_said_to_be(tmp_path):
    x = torch.tensor([[0.0, 0, float(row + 1)] for row in range(6)])
    for name in "ab":
        content = {key: value for key, value in PLAIN.items() if key != "edge_index"}
        torch.save(content | {"x": x}, tmp_path / f"{name}.pt")
    assert len(load_folder(tmp_path, SPLIT, 0)) == 2
    with pytest.raises(DataError, match=r"client 0.* 6 .*data\.features"):
        load_folder(tmp_path, SPLIT, 0, how=ReadOptions(features="presence"))


# Constructors -------------------------------------------------------------------------------------


def client(**changes: Any) -> ClientGraph:
    return ClientGraph(
        **{"client": 9, "nodes": torch.arange(6), "hidden_edges": None, **PLAIN, **changes}
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.where(X == 3, torch.inf, X)}, "x[2, 0] is inf:"),
        ({"x": X.double()}, "x is torch.float64 [6, 2]:"),
        ({"y": PLAIN["y"].float()}, "y is torch.float32 [6]:"),
        ({"edge_index": PAIRS + 4}, "edge_index[0, 4] is 6:"),
        ({"edge_index": PAIRS[:, :1]}, "edge_index must have every edge once in each direction"),
        ({"train_mask": mask(0)[:5]}, "train_mask is torch.bool [5]:"),
        ({"y": torch.full((6,), -1)}, "train_mask: node 0"),
        ({"val_mask": mask(0)}, "train_mask and val_mask overlap in 1 nodes, as 0"),
    ],
)
def test_constructors_name_the_client(changes, words):
    check_clients([client(), client(edge_index=None), client(x=X.to_sparse_csr())])
    with pytest.raises(DataError) as caught:
        check_clients([client(), client(**changes)])
    assert str(caught.value).startswith(f"client 9: {words}")


def test_what_was_found_fit_is_looked_at_once_until_it_is_written_into(monkeypatch):
    check_clients([held := client(x=X.clone())])
    with monkeypatch.context() as patched:
        patched.setattr(torch, "isfinite", lambda _: pytest.fail("looked at again"))
        check_clients([held])
    held.x[2, 0] = torch.nan
    with pytest.raises(DataError, match=r"x\[2, 0\].*nan"):
        check_clients([held])


# Edges, features and masks of one graph -----------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=40))
def test_to_undirected_is_what_pyg_gives(pairs):
    edges = torch.tensor(pairs).t()
    expected = coalesce(pyg_to_undirected(remove_self_loops(edges)[0], num_nodes=7), num_nodes=7)
    assert torch.equal(to_undirected(edges, 7), expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1), st.data())
def test_rows_of_a_sparse_matrix_are_those_of_the_dense_one(numbers, data):
    x = torch.tensor(numbers, dtype=torch.float32)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(numbers) - 1), min_size=1)))
    taken = take_rows(x.to_sparse_csr(), rows)
    assert taken.layout == torch.sparse_csr
    assert torch.equal(taken.to_dense(), take_rows(x, rows))
    assert torch.equal(take_rows(x, rows), x[rows])


def test_sparse_features_that_would_be_too_large_are_refused_before_anything_is_made():
    huge = torch.sparse_coo_tensor(
        torch.zeros(2, 0, dtype=torch.int64), [], (10**6, 10**5), check_invariants=True
    )
    with pytest.raises(DataError, match=r"400\.0.*limit.*2\.0"):
        read_features(huge, [])
    check_dense_size(1_000_000, 500, "")
    with pytest.raises(DataError, match="do that"):
        check_dense_size(1_000_000, 501, "do that")


# Weights of edges ---------------------------------------------------------------------------------

WEIGHTED = ReadOptions(weights=True)
# A path 0 - 1 - 2 - 3 whose edges weigh 2, 3 and 5; the last is given both ways
WEIGHTED_EDGES = torch.tensor([[1, 1, 3, 2, 0], [0, 2, 2, 3, 0]])
WEIGHT = torch.tensor([2.0, 3, 5, 5, 9])


def weighted(**more: Any) -> Data:
    x, y = torch.eye(4), torch.tensor([0, 1, 0, 1])
    return Data(**{"x": x, "y": y, "edge_index": WEIGHTED_EDGES, "edge_weight": WEIGHT, **more})


def by_pair(graph: Any, names: torch.Tensor | None = None) -> dict[tuple[int, int], float]:
    """Give the weight of each pair of nodes, by their numbers in the whole graph."""
    ends = graph.edge_index if names is None else names[graph.edge_index]
    pairs = map(tuple, ends.T.tolist())
    return dict(zip(pairs, graph.edge_weight.tolist(), strict=True))


BOTH = {(0, 1): 2, (1, 0): 2, (1, 2): 3, (2, 1): 3, (2, 3): 5, (3, 2): 5}


def test_every_direction_has_the_edges_weight():
    graph = as_graph(weighted(), weights=True)
    assert by_pair(graph) == BOTH
    column = as_graph(weighted(edge_weight=None, edge_attr=WEIGHT[:, None].double()), weights=True)
    assert by_pair(column) == BOTH
    differing = torch.tensor([2.0, 3, 4, 6, 9])  # 3 - 2 and 2 - 3 by two weights
    mean = as_graph(weighted(edge_weight=differing), weights=True)
    assert by_pair(mean) == BOTH and "1 edges have several weights" in str(mean.notes)


def test_what_cannot_be_weights_is_refused_and_what_is_ignored_is_said():
    for weight, words in ((WEIGHT[:3], "number for each edge"), (-WEIGHT, "0 or more"),
                          (WEIGHT / 0, "finite")):  # fmt: skip
        with pytest.raises(DataError, match=f"edge_weight.*{words}"):
            as_graph(weighted(edge_weight=weight), weights=True)
        as_graph(weighted(edge_weight=weight))  # of a run that does not use them
    several = weighted(edge_weight=None, edge_attr=torch.ones(5, 2))
    for data, uses in ((weighted(), False), (several, True)):
        graph = as_graph(data, weights=uses)
        (said,) = [note for note in graph.notes if isinstance(note, Caution)]
        assert graph.edge_weight is None and "is ignored" in said


@pytest.mark.parametrize(
    "how",
    [
        {"method": "random", "clients": 3},
        {"method": "metis", "clients": 3},
        {"method": "metis-overlapping", "clients": 4, "draws": 4},
        {"method": "ego-networks", "clients": 4, "hops": 2, "min_nodes": 4},
    ],
)
def test_clients_parts_and_copies_keep_the_weights_of_their_edges(how):
    data = valued(60, y=torch.arange(60) % 2)
    weight = 1 + torch.arange(data.edge_index.shape[1]) % 7
    graph = as_graph(Data(**{**data.to_dict(), "edge_weight": weight}), weights=True)
    wanted, seen = by_pair(graph), 0
    for weighted_client in partition_graph(graph, PartitionSection(**how), 0.0, 0):
        own = by_pair(weighted_client, weighted_client.nodes)
        assert own.items() <= wanted.items() and len(own) == weighted_client.edge_index.shape[1]
        seen += len(own)
    assert seen


def test_clients_of_one_file_keep_the_weights_of_their_edges(tmp_path):
    data = weighted(client=[1, 0, 0, 0], train_mask=torch.ones(4) > 0, val_mask=torch.zeros(4) > 1)
    torch.save(data, tmp_path / "g.pt")
    graphs = load_folder(tmp_path / "g.pt", SPLIT, 0, how=WEIGHTED)
    assert by_pair(graphs[0]) == {(0, 1): 3, (1, 0): 3, (1, 2): 5, (2, 1): 5}
    assert all(one.edge_weight is None for one in load_folder(tmp_path / "g.pt", SPLIT, 0))


def test_links_are_passed_over_with_their_weights():
    n = 40
    pairs = torch.randint(n, (2, 200), generator=torch.Generator().manual_seed(0))
    weight = 1.0 + pairs.amin(0) * n + pairs.amax(0)  # which says of what edge it is
    data = Data(x=torch.eye(n), y=torch.zeros(n).long(), edge_index=pairs, edge_weight=weight)
    data.train_mask = torch.ones(n) > 0
    task, local = LinkTask(0.2, 0.2, 1), client_graph_from_data(0, data, weights=True)
    seen = []

    def forward(given):
        seen.append(given)
        return given.x

    placed = task.place(local, torch.device("cpu"))
    task.judge(forward, placed)
    for one in (placed, *seen):
        ends = one.edge_index
        torch.testing.assert_close(one.edge_weight, 1.0 + ends.amin(0) * n + ends.amax(0))
    assert placed_on(local, torch.device("cpu")).edge_index.shape != placed.edge_index.shape


EACH = [
    pytest.param(name, marks=() if name == "fedavg" else pytest.mark.slow)
    for name in (*COMPARED, "fedgta", "fedpub")
]


@pytest.mark.parametrize("name", EACH)
def test_methods_use_them_and_say_the_same_of_their_nodes_as_of_newcomers(name, tmp_path):
    data = valued(90, y=torch.arange(90) % 3)
    data.edge_weight = 1.0 + torch.arange(data.edge_index.shape[1]) % 9
    torch.save(data, tmp_path / "graph.pt")
    data.edge_weight = None
    torch.save(data, tmp_path / "bare.pt")
    small = [one for one in METHODS[name].overrides if not one.startswith("data.")]
    words = (*small, "data.split=auto", "data.features=standardise", "partition.method=metis")
    words = (*words, "partition.ratios=[0.5,0.25,0.25]", "rounds=3")

    def run(file):
        setup = Setup(METHODS[name].config, (*words, f"data.name={tmp_path / file}"), 4)
        return fg.load_run(setup.run(tmp_path / file[:-3], state_dir=None).out)

    ours, bare = run("graph.pt"), run("bare.pt")
    found, theirs = (one.predictions(0).probability for one in (ours, bare))
    assert not np.allclose(found, theirs, atol=1e-5)
    (graph, *_) = method_of(ours.config).graphs(ours.config)
    x, weight = data.x[graph.nodes], graph.edge_weight
    said = ours.predict(x, graph.edge_index, client=0, edge_weight=weight).amax(1)
    place = {node: row for row, node in enumerate(graph.nodes.tolist())}
    rows = [place[one] for one in ours.predictions(0).node]
    np.testing.assert_allclose(said[rows], found, atol=1e-4)
