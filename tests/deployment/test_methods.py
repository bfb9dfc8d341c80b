"""Each method with SuperLink and SuperNodes over TLS: what the simulation gives, to rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deployment_helpers import CASES, TIMEOUT, check_equal, prepare, start_nodes

from deploy.loopback import Loopback

OUTPUTS = {"config.yaml", "metrics.jsonl", "result.json", "curves.png"}


@pytest.mark.parametrize("app", sorted(CASES))
def test_each_method_gives_what_the_simulation_gives(
    deployment: Loopback, keys: list[Path], tmp_path: Path, app: str
) -> None:
    prepared = prepare(CASES[app], tmp_path / app)
    names = start_nodes(deployment, prepared, keys)
    deployment.start_run(f"run-{app}", prepared.settings())
    log = deployment.wait(f"run-{app}", TIMEOUT)
    out = tmp_path / app / "deployed"
    assert (out / "result.json").is_file(), log + deployment.log(names[0])
    check_equal(prepared)
    simulated = {path.name for path in (tmp_path / app / "simulated").iterdir()}
    expected = simulated - prepared.case.simulation_only
    assert {path.name for path in out.iterdir()} == expected >= OUTPUTS
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert (result["engine"], result["clients"]) == ("flwr", prepared.simulated["clients"])
    assert result["bytes"] == prepared.simulated["bytes"]
    assert result["rejected"] == 0
