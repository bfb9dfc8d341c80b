from __future__ import annotations

import os
from pathlib import Path

import pytest

from flower_graph.storage.supernode_folder import (
    STATE_VARIABLE,
    default_folder,
    own_folder,
    remove_if_empty,
)


def test_who_starts_a_run_may_say_where_state_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "here"))
    assert default_folder() == tmp_path / "here"
    monkeypatch.delenv(STATE_VARIABLE)
    assert default_folder().name == f"flower-graph-{os.getuid()}"


def test_a_folder_is_removed_by_the_last_that_leaves_it(tmp_path: Path) -> None:
    """Two clients of a run may end at once: neither fails when the other was faster."""
    folder = tmp_path / "all" / "run-1"
    own_folder(folder)
    (folder / "node-2.bin").touch()
    remove_if_empty(folder)
    assert (folder / "node-2.bin").exists()
    (folder / "node-2.bin").unlink()
    remove_if_empty(folder)
    assert not folder.exists()
    remove_if_empty(folder)
    assert folder.parent.is_dir()
