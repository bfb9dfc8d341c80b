"""A run takes the place of an old one, of every method; what no run wrote is never deleted."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from federation import METHODS, tried

import flower_graph as fg
from flower_graph.errors import ConfigError, OutputError
from flower_graph.storage.files import folder_lock

NAMES = tried(METHODS)
SHORT = ("rounds=2", "checkpoint_every=1", "every=1", "keep=best", "metrics=[macro-f1]")


def train(name: str, out: Path, *more: str, seeds: tuple[int, ...] = (0,)) -> fg.Run:
    setup = METHODS[name]
    words = [*setup.overrides, *SHORT, *more]
    how = {"supernodes": setup.supernodes, "quiet": True}
    return fg.run(setup.config, words, seed=seeds, out=out, overwrite=True, **how)  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize("name", NAMES)
def test_an_old_run_is_deleted_whole(name: str, tmp_path: Path) -> None:
    more = ["strategy.state=file"] * (name == "nfedgnn")
    train(name, tmp_path, *more)
    (tmp_path / "predictions.csv").write_text("old")
    (tmp_path / "checkpoints" / "round-000009").mkdir()
    again = train(name, tmp_path, "rounds=1", "save=none", "every=0", "keep=last")
    assert len(again.metrics) == 1
    assert not (tmp_path / "checkpoints" / "round-000009").exists()
    assert not (tmp_path / "predictions.csv").exists() and not (tmp_path / "rows").exists()


def test_the_runs_of_several_seeds_are_one(tmp_path: Path) -> None:
    train("fedavg", tmp_path, seeds=(0, 1))
    assert list(train("fedavg", tmp_path, seeds=(1, 2)).seeds) == [1, 2]
    train("fedavg", tmp_path)
    assert not [*tmp_path.glob("seed-*"), *tmp_path.glob("summary.json")]


CHANGES: dict[str, Callable[[Path], object]] = {
    "note": lambda out: (out / "notes.txt").write_text("mine"),
    "history": lambda out: (out / ".git").mkdir(),
    "other settings": lambda out: (out / "config.yaml").write_text("app: mine\n"),
    "no settings": lambda out: (out / "config.yaml").unlink(),
    "link to a seed": lambda out: (out / "seed-0").symlink_to(out.parent / "other"),
    "link to a folder": lambda out: (out / "snapshots").symlink_to(out.parent / "other"),
}


def test_a_folder_that_is_not_only_a_runs_is_kept(tmp_path: Path) -> None:
    train("fedavg", tmp_path / "other")
    for name, change in CHANGES.items():
        run = shutil.copytree(tmp_path / "other", tmp_path / name)
        change(run)
        before = files(tmp_path)
        with pytest.raises(OutputError):
            train("fedavg", run)
        assert files(tmp_path) == before and (name != "history" or (run / ".git").is_dir()), name


def test_an_old_run_stays_until_the_new_one_may_begin(tmp_path: Path) -> None:
    train("fedavg", tmp_path)
    before = files(tmp_path)
    with pytest.raises(ValueError, match=r"data\.name|nowhere"):
        train("fedavg", tmp_path, "data.name=nowhere.pt")
    assert files(tmp_path) == before
    with pytest.raises(ConfigError):
        fg.run(str(tmp_path / "config.yaml"), out=tmp_path, overwrite=True)
    with folder_lock(tmp_path), pytest.raises(OutputError):
        train("fedavg", tmp_path)
    assert files(tmp_path) == before
