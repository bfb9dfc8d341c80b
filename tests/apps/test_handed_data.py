"""Clients on a machine that has none of a run's files: the driver hands over what it has made."""

import pickle
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict
from own_graphs import alike

from flower_graph import handed
from flower_graph.data.sources import datasets
from flower_graph.errors import DataError
from flower_graph.flower_compat import NumPyClient
from flower_graph.handed import noted, take_over
from flower_graph.method import of_app
from flower_graph.method.of_app import configured
from flower_graph.method.registry import method_of
from flower_graph.storage.files import IN_PROCESS

SECTIONS = {
    "nfedgnn": "",
    "fedscem": "",
    "fedgls": "partition: {clients: 3}",
    "ppfl": "model: {name: gat}",
    "fedavg": "partition: {clients: 3}",
}


def _client(context: Context) -> NumPyClient:
    config, _ = configured(context)
    return method_of(config).build_client(config, context, None)


@pytest.mark.parametrize("method", SECTIONS)
def test_clients_need_no_file_of_the_run(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handed, "_TAKEN", {})
    graph, yaml = tmp_path / "graph.pt", tmp_path / "mine.yaml"
    torch.save(alike().to_dict(), graph)
    yaml.write_text(
        f"app: {method}\ndata: {{name: {graph}, split: random, ratios: [0.4, 0.3, 0.3]}}\n"
        + SECTIONS[method],
        encoding="utf-8",
    )
    node = {"partition-id": 1, "num-partitions": 2, "state-dir": IN_PROCESS}
    context = Context(5, 6, node, RecordDict(), {"config": str(yaml)})
    with noted() as made:
        config, _ = configured(context)
        method_of(config).num_clients(config)
    things = pickle.dumps(made)
    of_app._configuration.cache_clear()
    datasets._made.clear()
    graph.unlink()
    with pytest.raises(DataError):  # as on another machine
        _client(context)
    yaml.unlink()
    take_over(pickle.loads(things))
    for partition in (0, 1):
        node["partition-id"] = partition
        assert isinstance(
            _client(Context(5, partition, node, RecordDict(), context.run_config)), NumPyClient
        )
