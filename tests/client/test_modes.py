"""Whatever lay in a SuperNode's place before, what its clients leave is their owner's alone."""

import os
from pathlib import Path

import pytest
from federation import METHODS

from flower_graph.storage.files import own_folder, private_folder
from flower_graph.storage.writing import new_file, replaced


def open_to_others(folder: Path) -> list[Path]:
    """List what other users could read."""
    return [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]


@pytest.mark.parametrize("name", ["nfedgnn", pytest.param("fedscem", marks=pytest.mark.slow)])
def test_whatever_a_run_leaves_at_its_clients_is_theirs_alone(name: str, tmp_path: Path) -> None:
    """Keys, state, checkpoints and outputs; with a state-dir that was open to all."""
    place = tmp_path / "state"
    place.mkdir()
    place.chmod(0o777)
    before = os.umask(0)
    try:
        overrides = ("rounds=2", "checkpoint_every=1", "save=all")
        METHODS[name].run(tmp_path / "out", *overrides, supernodes=3, state_dir=place)
    finally:
        os.umask(before)
    assert {"checkpoints", "outputs"} <= {path.name for path in place.iterdir()}
    assert not open_to_others(place)


def test_a_file_that_others_hold_open_is_not_written_into(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    path.chmod(0o666)
    with path.open() as spy:
        os.close(new_file(path))
        path.write_text("secret")
        assert spy.read() == "old"


def test_folders_that_are_made_on_the_way_are_closed(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        private_folder(tmp_path / "a" / "b")
        with replaced(tmp_path / "c" / "d" / "file") as stream:
            stream.write(b"1")
        own_folder(tmp_path / "place" / "checkpoints" / "round-1", tmp_path / "place")
    finally:
        os.umask(before)
    assert not {*open_to_others(tmp_path)} - {tmp_path}
