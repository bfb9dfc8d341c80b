"""A SuperNode's trust settings: from its node config, or with a simulation's temporary key.

A simulation's SuperNodes run on the server's machine and have no keys. Without a registry,
``throwaway_parties`` makes a key for each, in a folder of that machine that is removed after the
run. A SuperNode on another machine finds no key and refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flower_graph.errors import RefusedError
from flower_graph.storage.files import PARTITION, default_folder, own_folder

if TYPE_CHECKING:
    from flwr.app import Context

    from flower_graph.secure.parties.registry import TrustSettings

REGISTRY_FILE = "registry.json"


def throwaway_parties(run_id: int, hosted: Sequence[range]) -> Path:
    """Make a key for each SuperNode of a simulation; return the registry's file.

    The keys are removed with the run's other files. ``hosted`` has the clients of each SuperNode,
    by its ``partition-id``.
    """
    # Imported here, because importing keys takes longer than starting a run without them.
    from flower_graph.secure.parties.registry import Registry, new_identity

    folder = _folder(run_id)
    own_folder(folder, default_folder())
    registry = Registry({}, max(map(len, hosted)))
    for partition, clients in enumerate(hosted):
        registry = registry.with_party(new_identity(folder / str(partition)), [clients])
    registry.write(folder / REGISTRY_FILE)
    return folder / REGISTRY_FILE


def trust_of(context: Context, *, hides: bool = False) -> TrustSettings:
    """Read the trust settings of a SuperNode that does not trust the server.

    They are in its node config; in a simulation, the keys of its partition. ``RefusedError`` if
    there are neither. With ``hides`` two sums reveal nothing about a single vector, because every
    vector has the noise that the node config asks for, or sums are under pads: two sums may then
    differ by one SuperNode.
    """
    from flower_graph.secure.parties.registry import IDENTITY_KEY, REGISTRY, TrustSettings

    settings = TrustSettings.of(context.node_config, context.run_id)
    if settings is None:
        folder, partition = _folder(context.run_id), str(context.node_config.get(PARTITION, ""))
        if not partition.isdigit() or not (folder / partition).is_file():
            raise RefusedError(f"this SuperNode has no key: node-config {IDENTITY_KEY}, {REGISTRY}")
        files = {IDENTITY_KEY: folder / partition, REGISTRY: folder / REGISTRY_FILE}
        named = {key: str(file) for key, file in files.items()}
        settings = TrustSettings.of({**context.node_config, **named}, context.run_id)
        assert settings is not None
    return replace(settings, differ_by=1) if hides else settings


def _folder(run_id: int) -> Path:
    return default_folder() / f"run-{run_id}" / "parties"
