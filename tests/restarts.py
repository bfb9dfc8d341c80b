"""A grid whose SuperNodes are started anew between rounds, with what they saved and no more."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict

from flower_graph import state
from flower_graph.secure import vault
from flower_graph.simulation import InProcessGrid


class Restarting(InProcessGrid):
    """Starts SuperNodes anew once some rounds are done.

    Parameters
    ----------
    app : ClientApp
        Of every node.
    final : str
        Type of a round's last message.
    restarts : mapping
        Rounds that are done: partitions that are started anew then.
    new_id : bool
        Whether they get other ids, as SuperNodes without authentication do.
    state_dir : Path or None
        Where they keep what lasts; None for nowhere.
    """

    def __init__(
        self,
        app: Any,
        *,
        num_supernodes: int,
        final: str,
        restarts: Mapping[int, Iterable[int]],
        new_id: bool,
        state_dir: Path | None,
    ) -> None:
        where = {"state-dir": "" if state_dir is None else str(state_dir)}
        super().__init__(app, num_supernodes=num_supernodes, node_config=where)
        self.final, self.new_id = final, new_id
        self.waiting = {done: list(nodes) for done, nodes in restarts.items()}
        self.done, self.restarted, self._is_trained = 0, 0, False

    def get_node_ids(self) -> list[int]:
        """Start anew whom it is time for; return who is there."""
        for partition in self.waiting.pop(self.done, []):
            self.restart(partition)
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver messages, and note when a round's last ones are."""
        sent = list(messages)
        found = super().push_messages(sent)
        kind = sent[0].metadata.message_type if sent else ""
        self._is_trained |= kind == "train"
        if kind == self.final and self._is_trained:
            self.done, self._is_trained = self.done + 1, False
        return found

    def restart(self, partition: int) -> None:
        """End a SuperNode and start it anew: memory and context are gone."""
        old = next(c for c in self.contexts.values() if c.node_config["partition-id"] == partition)
        for kept in (state._LIVE, state._TOKENS, state._FIXED, state._MAPS, vault._LIVE):
            for key in [key for key in kept if key[:2] == (old.run_id, old.node_id)]:
                del kept[key]
        del self.contexts[old.node_id]
        number = secrets.randbits(63) if self.new_id else old.node_id
        self.contexts[number] = Context(
            old.run_id, number, old.node_config, RecordDict(), old.run_config
        )
        self.restarted += 1
