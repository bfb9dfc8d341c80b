"""SuperNodes that die and come back with their files: the run ends as if they had not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import ALL, COMPARED, EACH, METHODS, PERSONAL, Setup, assert_close, later, tried

from flower_graph.client import state
from flower_graph.storage import checkpoint
from flower_graph.storage.sealed import SEALED

# The loss of a client's state is not noticed: weights come anew
AVERAGES = ("fedgls", *PERSONAL, *COMPARED)
KEEPS_STATE = [name for name in METHODS if name not in (*AVERAGES, "lpgnn")]
IDS = pytest.mark.parametrize("new_id", [True, False], ids=["new-id", "same-id"])


def few(name: str, rounds: int = 4) -> Setup:
    """Take three SuperNodes, or the fewest that the setting takes."""
    setup = ALL[name].with_(f"rounds={rounds}", "strategy.timeout=5")
    return setup.with_(supernodes=min(max(3, setup.fewest), setup.supernodes))


# Where a variant keeps its state does not depend on the id.
@pytest.mark.parametrize(
    ("name", "new_id"),
    [pytest.param(*p.values, new, marks=p.marks) for new in (True, False)
     for p in later(tried(ALL) if new else EACH)],
)  # fmt: skip
def test_they_go_on_where_they_were(name: str, new_id: bool, tmp_path: Path) -> None:
    setup, where = few(name), tmp_path / "state"
    restarts = {1: [0], 2: [1, 2], 3: [0, 2]}
    ended = setup.run(tmp_path / "out", state_dir=where, new_id=new_id, restarts=restarts)
    assert ended.grid.restarted == 5
    assert ended.result["rejected"] == 0
    assert_close(ended, setup.whole(), setup.atol, setup.atol)
    for file in where.rglob("*.*"):
        assert file.is_dir() or file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", tried([*METHODS, "deepwalk, secure"]))
def test_they_go_on_with_encrypted_files_of_any_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors above a limit lie in files of their own."""
    setup, save, written = few(name), checkpoint.save_client, set[str]()

    def saved(path: Path, *given: Any) -> None:
        save(path, *given)
        assert path.read_bytes().startswith(SEALED)
        written.add(path.suffix)

    whole = setup.whole()  # before anything is patched
    monkeypatch.setattr(state, "SMALL_BYTES", 0)
    monkeypatch.setattr(checkpoint, "save_client", saved)
    (key := tmp_path / "key").write_text("ab" * 32)
    key.chmod(0o600)
    sealed = {"state_dir": tmp_path / "state", "node_config": {"state-key": str(key)}}
    ended = setup.run(tmp_path / "out", new_id=True, restarts={2: [0, 1]}, **sealed)
    assert written == {".state", ".safetensors"}
    assert ended.result["rejected"] == 0
    assert_close(ended, whole, setup.atol, setup.atol)


@pytest.mark.parametrize("name", tried(["nfedgnn", "fedscem"]))
def test_nothing_is_left_after_a_run_that_ends_with_a_message(name: str, tmp_path: Path) -> None:
    few(name).run(tmp_path / "out", restarts={2: [1]}, state_dir=tmp_path / "state")
    left = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    # But for what is kept on purpose, to be used
    assert not [path for path in left if path.relative_to(tmp_path).parts[1] != "outputs"]
    assert not [path for path in left if path.name == "measured.bin" or "snapshots" in path.parts]


@IDS
@pytest.mark.parametrize("name", tried([*KEEPS_STATE, "deepwalk, secure", "deepwalk, alone"]))
def test_without_a_place_what_is_lost_is_said_and_the_run_goes_on(
    name: str, new_id: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = few(name, 5).run(tmp_path, new_id=new_id, restarts={2: [1]}, state_dir=None)
    assert np.isfinite(ended.reports[-1].loss)
    assert ended.reports[-1].answered == ended.reports[0].answered, "it takes part again"
    said = [r.getMessage() for r in caplog.records if "has lost its state" in r.getMessage()]
    assert len(said) == 1, said
