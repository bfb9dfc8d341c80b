"""Each method with SuperLink and SuperNodes over TLS: what the simulation gives, to rounding.

nFedGNN and FedGLS are in ``test_faults.py``: what they give while SuperNodes and the server die.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deployment_helpers import CASES, TIMEOUT, check_equal, check_outputs, prepare, start_nodes

from deploy.loopback import Loopback


@pytest.mark.parametrize("app", ["fedscem", pytest.param("ppfl", marks=pytest.mark.fast)])
def test_each_method_gives_what_the_simulation_gives(
    deployment: Loopback, keys: list[Path], tmp_path: Path, app: str
) -> None:
    prepared = prepare(CASES[app], tmp_path / app)
    names = start_nodes(deployment, prepared, keys)
    deployment.start_run(f"run-{app}", prepared.settings())
    log = deployment.wait(f"run-{app}", TIMEOUT)
    assert (prepared.folder / "deployed" / "result.json").is_file(), log + deployment.log(names[0])
    check_equal(prepared)
    result = check_outputs(prepared)
    assert result["bytes"] == prepared.simulated["bytes"]
    assert result["rejected"] == 0
