"""A run reads no file, no variable and no setting of a SuperNode's machine, and hears of none."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from mutations import Evil

from flower_graph.apps.client_app import app
from flower_graph.client.adaptor import make_client_app
from flower_graph.errors import ConfigError, DataError, RefusedError, StateLostError
from flower_graph.flower_compat import NumPyClient
from flower_graph.method.of_app import configured, configured_client
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.client_errors import AT_HOME

SECRET = "hunter2-of-this-machine"
NODE: dict[str, Any] = {"partition-id": 0, "num-partitions": 1}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", SECRET)


def asked(
    client_app: Any,
    tmp_path: Path,
    kind: str = "query",
    node: dict[str, Any] | None = None,
    **run: str,
) -> str:
    """Send a SuperNode a message; return the reason of its error."""
    there = {**NODE, "state-dir": str(tmp_path / "state"), **(node or {})}
    grid = InProcessGrid(client_app, num_supernodes=1, run_config=run, node_config=there)
    (number,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(RecordDict(), number, kind)])
    assert reply.has_error()
    return str(reply.error.reason)


LEAKS = [
    "device=${oc.env:A_SECRET}",
    "data.name=${oc.env:A_SECRET}",
    "device=${oc.${app}:A_SECRET}",
    "device=${oc.decode:${oc.env:A_SECRET}}",
    "data={name: '${oc.env:A_SECRET}'}",
    "data.ratios=['${oc.env:A_SECRET}',0.1,0.1]",
    "device=${${data.name}}",
]


@pytest.mark.parametrize("override", LEAKS)
def test_a_run_config_reads_no_environment(tmp_path: Path, override: str) -> None:
    given = {"config": "quickstart", "overrides": f'"{override}"'}
    said = asked(app, tmp_path, **given)
    assert SECRET not in said
    for at in (configured, configured_client):
        with pytest.raises(ConfigError) as caught:
            at(Context(1, 2, dict(NODE), RecordDict(), dict(given)))
        assert SECRET not in str(caught.value)


def test_settings_may_name_each_other() -> None:
    given: Any = {"config": "quickstart", "overrides": "data.split_seed='${seed}' seed=5"}
    for at in (configured, configured_client):
        config, _ = at(Context(1, 2, dict(NODE), RecordDict(), given))
        assert config.data.split_seed == 5


def planetoid(folder: Path) -> Path:
    """Lay a Cora whose files run code when they are read."""
    raw = folder / "Planetoid" / "Cora" / "raw"
    raw.mkdir(parents=True)
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph"):
        (raw / f"ind.cora.{part}").write_bytes(pickle.dumps(Evil(str(folder / "ran"))))
    (raw / "ind.cora.test.index").write_text("0\n")
    return folder


@pytest.mark.parametrize("data", ["data.root={folder} data.name=Cora", "data.name={folder}/g.pt",
                                  "data.name=Airports/../../{folder}", "data.name={folder}/",
                                  "data.name=../g.json", "data.add={folder}/g.pt"])  # fmt: skip
def test_a_run_chooses_no_files_of_a_supernode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(tmp_path / "cache"))
    folder = planetoid(tmp_path / "planted")
    given = data.format(folder=folder)
    said = asked(app, tmp_path, config="nfedgnn/cora", overrides=given)
    assert "ConfigError" in said and "no path" in said
    assert not (folder / "ran").exists()


NAMES = ["mine.pt", "./mine.pt", "work/mine", "work/mine.bin", "work", "~/mine.pt",
         "~nobody-here/a.pt", "~root/a.pt", "work/"]  # fmt: skip


@pytest.mark.parametrize("node", [{}, {"data": "Cora"}], ids=["any", "data"])
def test_a_run_does_not_learn_which_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: dict[str, Any]
) -> None:
    home = tmp_path / "home-of-somebody"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))

    def answers(name: str) -> set[str]:
        keys = ("data.name", "data.add") if name.endswith(".pt") else ("data.name",)
        runs = [{"config": "nfedgnn/cora", "overrides": f"{key}={name}"} for key in keys]
        runs[0]["output-dir"] = name
        return {asked(app, tmp_path, node=node, **run) for run in runs}

    before = {name: answers(name) for name in NAMES}
    assert len({said for each in before.values() for said in each}) == 2, "one answer for each key"
    (home / "work").mkdir()
    for name in ("mine.pt", "work/mine", "work/mine.bin", "work/a.pt", "work/nodes.csv"):
        (home / name).write_text("")
    after = {name: answers(name) for name in NAMES}
    assert before == after
    assert not any(
        str(tmp_path) in said or "mine" in said for each in after.values() for said in each
    )


def test_a_supernode_has_its_paths_from_its_own_config(tmp_path: Path) -> None:
    node = {**NODE, "data-root": "/own"}
    run: Any = {"config": "quickstart", "overrides": "data.root=/run data.name=Cora",
                "output-dir": "/run/out"}  # fmt: skip
    config, out = configured_client(Context(1, 2, node, RecordDict(), run))
    assert (config.data.root, out) == ("/own", None)
    node = {**NODE, "state-dir": ":memory:"}
    config, out = configured_client(Context(1, 2, node, RecordDict(), run))
    assert (config.data.root, str(out)) == ("/run", "/run/out")


def test_a_run_reads_no_local_yaml(tmp_path: Path) -> None:
    (tmp_path / "passwords.yaml").write_text(f"seed: {SECRET}\n")
    path = str(tmp_path / "passwords.yaml")
    said = asked(app, tmp_path, config=path)
    assert SECRET not in said
    assert "no path" in said


class Failing(NumPyClient):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def get_properties(self, config: Any) -> dict[str, Any]:
        raise self.error


ERRORS: list[tuple[Exception, str]] = [
    (KeyError(SECRET), f"ClientError: KeyError: {AT_HOME}"),
    (FileNotFoundError(2, "No such file", SECRET), f"ClientError: FileNotFoundError: {AT_HOME}"),
    (ValueError(SECRET), f"ClientError: ValueError: {AT_HOME}"),
    (DataError(SECRET), f"DataError: {AT_HOME}"),
    (StateLostError(f"{SECRET} is damaged"), f"StateLostError: {AT_HOME}"),
    (RefusedError("round 3 was masked before"), "RefusedError: round 3 was masked before"),
]


@pytest.mark.parametrize("error,said", ERRORS, ids=lambda one: type(one).__name__)
def test_errors_leave_by_their_kind(tmp_path: Path, error: Exception, said: str) -> None:
    client_app = make_client_app(lambda context: Failing(error))
    assert asked(client_app, tmp_path).startswith(said)
    # On one's own machine all of it is told.
    at_home = asked(client_app, tmp_path, node={"state-dir": ":memory:"})
    assert str(error) in at_home


@pytest.mark.parametrize(
    "node,wanted",
    [
        ({"data-folder": f"/nowhere/{SECRET}"}, "DataError: data-folder"),
        (
            {"partition-id": SECRET},
            "ConfigError: node-config partition-id",
        ),
    ],
)
def test_what_is_wrong_with_a_node_is_told_without_its_config(
    tmp_path: Path, node: dict[str, Any], wanted: str
) -> None:
    said = asked(app, tmp_path, node=node, config="nfedgnn/cora-linqs")
    assert said.startswith(wanted)
    assert SECRET not in said
    assert "no such" not in said  # nor whether a file is there


def test_a_method_that_is_not_allowed_does_not_tell_which_are(tmp_path: Path) -> None:
    said = asked(app, tmp_path, node={"methods": SECRET}, config="fedgls/cora",
                 overrides="app=strangers.mine")  # fmt: skip
    assert SECRET not in said
    assert "app: 'strangers.mine'" in said
