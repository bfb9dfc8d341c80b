"""Whom a SuperNode trusts: what its node config says, or the throw-away key of a simulation.

A simulation's SuperNodes are on the server's own machine, and nobody can have handed their keys
out. So whoever starts a run without a registry makes a key for each (``throwaway_parties``), in a
folder of that machine that goes with the run; a SuperNode elsewhere finds none and refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flower_graph.errors import RefusedError
from flower_graph.storage.files import default_folder, own_folder
from flower_graph.storage.places import PARTITION

if TYPE_CHECKING:
    from flwr.app import Context

    from flower_graph.secure.parties.identity import TrustSettings

REGISTRY_FILE = "registry.json"


def throwaway_parties(run_id: int, hosted: Sequence[range]) -> Path:
    """Make a key for each SuperNode of a simulation; return the registry's file.

    Parameters
    ----------
    run_id : int
        Flower's number of the run, with whose other files on this machine they go.
    hosted : sequence of range
        The clients of each SuperNode, by its ``partition-id``.
    """
    # Importing keys takes longer than a run without them starts.
    from flower_graph.secure.parties.identity import new_identity
    from flower_graph.secure.parties.registry import Registry

    folder = _folder(run_id)
    own_folder(folder, default_folder())
    registry = Registry({}, max(map(len, hosted)))
    for partition, clients in enumerate(hosted):
        registry = registry.with_party(new_identity(folder / str(partition)), [clients])
    registry.write(folder / REGISTRY_FILE)
    return folder / REGISTRY_FILE


def trust_of(context: Context, noised: bool = False) -> TrustSettings:
    """Read the trust settings of a SuperNode that does not trust the server.

    Parameters
    ----------
    context : Context
        Its node config says it; in a simulation the keys that were made for its partition.
    noised : bool
        Whether noise that its node config asks for is in every vector: sums may then differ by one.

    Raises
    ------
    RefusedError
        There is neither.
    ConfigError, IdentityError
        As of ``TrustSettings.of``.
    """
    from flower_graph.secure.parties.identity import IDENTITY_KEY, REGISTRY, TrustSettings

    settings = TrustSettings.of(context.node_config, context.run_id)
    if settings is None:
        folder, partition = _folder(context.run_id), str(context.node_config.get(PARTITION, ""))
        if not partition.isdigit() or not (folder / partition).is_file():
            raise RefusedError(
                "clients of this run do not trust the server, and this SuperNode has no key of its "
                f"own: name {IDENTITY_KEY} and {REGISTRY} in its node config"
            )
        files = {IDENTITY_KEY: folder / partition, REGISTRY: folder / REGISTRY_FILE}
        named = {key: str(file) for key, file in files.items()}
        settings = TrustSettings.of({**context.node_config, **named}, context.run_id)
        assert settings is not None
    return replace(settings, differ_by=1) if noised else settings


def _folder(run_id: int) -> Path:
    return default_folder() / f"run-{run_id}" / "parties"
