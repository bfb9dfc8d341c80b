"""Names of data sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_graph.data.sources.names import (
    check_name,
    file_path,
    folder_path,
    known_names,
    pyg_name,
)
from flower_graph.errors import DataError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Cora", ("Planetoid", "Cora")),
        ("pubmed", ("Planetoid", "PubMed")),
        ("planetoid/citeseer", ("Planetoid", "CiteSeer")),
        ("Squirrel", ("WikipediaNetwork", "squirrel")),
        ("Actor", ("Actor", None)),
        ("wikics", ("WikiCS", None)),
        ("Coauthor/CS", ("Coauthor", "CS")),
        ("CitationFull/cora_ml", ("CitationFull", "Cora_ML")),
        # Not in any table of ours: PyG's own list of classes.
        ("heterophilousgraphdataset/Minesweeper", ("HeterophilousGraphDataset", "Minesweeper")),
        ("Reddit2", ("Reddit2", None)),
    ],
)
def test_names_stand_for_classes_of_pyg(name: str, expected: tuple[str, str | None]) -> None:
    assert pyg_name(name) == expected
    check_name(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Corra", "'Cora'"),
        ("cora-linq", "'cora-linqs'"),
        ("WikiCs2", "'WikiCS'"),
        ("ogbn-arxive", "'ogbn-arxiv'"),
        ("Amazon/Foto", "'Amazon/Photo'"),
        ("Redit", "'Reddit'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(DataError, match=f"data.name = '{name}'.*did you mean {near}"):
        check_name(name)


def test_names_like_no_other_are_refused_with_the_list() -> None:
    for name in ("", "/", "qqqqqqqq"):
        with pytest.raises(DataError, match="Known: cora-linqs, csbm"):
            check_name(name)


def test_known_names_are_known() -> None:
    names = known_names()
    assert {"cora-linqs", "csbm", "Cora", "chameleon", "ogbn-arxiv", "Amazon/Photo"} <= set(names)
    assert len(set(names)) == len(names)
    for name in names:
        check_name(name)


def test_a_name_is_a_file_when_it_looks_like_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Coauthor" / "CS").mkdir(parents=True)  # a folder is no saved graph
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "mine").touch()
    (tmp_path / "Cora").touch()  # no separator: the data set
    assert file_path("graphs/mine") == Path("graphs/mine")
    assert file_path("absent.pt") == Path("absent.pt")
    assert file_path("graphs/absent") is None
    assert file_path("Coauthor/CS") is None
    assert file_path("Cora") is None
    with pytest.raises(DataError, match=r"'absent\.pt': there is no such file"):
        check_name("absent.pt")


def test_a_name_is_a_folder_when_it_has_saved_graphs_or_a_slash_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("clients", "Planetoid/Cora/raw", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "clients" / "a.pt").write_bytes(b"")
    assert folder_path("clients") == folder_path("clients/") == Path("clients")
    assert folder_path(str(tmp_path / "clients")) == tmp_path / "clients"
    assert folder_path("absent/") == Path("absent")
    # Raw data that has the name of a data set, and what is a file
    for name in ("Planetoid/Cora", "empty", "absent", "Cora", "clients/a.pt"):
        assert folder_path(name) is None
