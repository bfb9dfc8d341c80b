"""The SuperNodes of a run of FedSCem, with their keys and slots."""

from __future__ import annotations

import logging
from typing import NamedTuple

from flwr.app import RecordDict

from flower_graph.errors import MalformedReplyError
from flower_graph.secure.align.blinded import MAX_CLIENTS
from flower_graph.secure.align.plaintext import PlaintextAlignmentServer
from flower_graph.secure.align.server import AlignmentServer
from flower_graph.secure.node_config import Limits
from flower_graph.secure.parties.alignment import VerifiedAlignmentServer
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.sum.server import Keys as SumKeys
from flower_graph.secure.sum.server import SumServer
from flower_graph.secure.sum.service import entries_of
from flower_graph.server.membership import Membership, renamed
from flower_graph.strategies.fedscem.cohort import EgoSettings
from flower_graph.strategies.fedscem.messages import VERIFIED, EgoEnrolment
from flower_graph.wire.fields import Resume, read_handled

LOG = logging.getLogger(__name__)
# Client numbers that one SuperNode may claim where identities are blinded: half of all there can be
MOST_CLAIMED = MAX_CLIENTS // 2


class Keys(NamedTuple):
    """A SuperNode's clients and keys."""

    clients: list[int]  # Ascending
    handled: int | None  # How many messages of this run they have handled, if known
    reply: SumKeys


class EgoMembership(Membership):
    """The clients of each SuperNode, their keys, and which slots they know."""

    def __init__(
        self,
        settings: EgoSettings,
        alignment: str,
        sums: SumServer,
        limits: Limits | None = None,
    ) -> None:
        super().__init__()
        self.settings, self.alignment, self.sums = settings, alignment, sums
        self.aligner: AlignmentServer | PlaintextAlignmentServer
        self.parties = sums if isinstance(sums, PartySums) else None
        if self.parties is not None:
            self.alignment = VERIFIED
            self.aligner = VerifiedAlignmentServer(sums.run_id, self.parties.registry, limits)
        elif alignment == "psi":
            self.aligner = AlignmentServer(limits)
        else:  # idle where nothing is shared
            self.aligner = PlaintextAlignmentServer()
        self.new: list[int] = []  # SuperNodes with keys, not aligned yet
        self.begun: set[int] = set()  # clients that have taken part in a round
        self.unsent: dict[
            int, dict[str, object]
        ] = {}  # the entries that tell each SuperNode its slots

    def question(self, resume: Resume) -> RecordDict:
        run = self.sums.run_id
        return EgoEnrolment(self.settings, run, self.alignment, resume).to_record()

    def read(self, node: int, content: RecordDict) -> Keys:
        reply: SumKeys = self.sums.enrolment[-1].from_config(entries_of(content))
        self.sums.check_keys(node, reply)
        if self.alignment == "psi" and reply.clients.size > MOST_CLAIMED:
            raise MalformedReplyError(
                f"{reply.clients.size} clients, at most {MOST_CLAIMED} are taken"
            )
        return Keys(sorted(reply.clients.tolist()), read_handled(entries_of(content)), reply)

    def unasked(self) -> None:
        """Leave out SuperNodes without keys."""

    def replaced(self, old: int, node: int, answer: Keys) -> None:
        """Rename a SuperNode that is back with its keys; forget one without."""
        if not self.sums.knows(old, answer.reply):
            self.forget(old)
            return
        self.sums.move(old, node)
        self.aligner.move(old, node)
        self.move(old, node)
        self.unsent = renamed(self.unsent, old, node)
        self.new = [node if at == old else at for at in self.new]

    def enrolled(self, node: int, answer: Keys) -> None:
        if self.sums.node_of(answer.clients[0]) != node:
            self.sums.enroll(node, answer.reply)
            self.new.append(node)
        if answer.handled == 0 and self.begun & set(answer.clients):
            LOG.warning("node %d has lost its state: its clients begin anew", node)

    def forget_unbound(self, parties: PartySums) -> None:
        """Ask parties again that have no binding for the next epoch."""
        for node in self.clients.keys() - parties.homes.values():
            self.forget(node)

    def begin_epoch(self) -> None:
        """Let the parties of a new epoch be aligned, and nobody else."""
        parties, aligner = self.parties, self.aligner
        assert parties is not None and parties.epoch is not None
        assert isinstance(aligner, VerifiedAlignmentServer)
        members = parties.epoch_clients()
        aligner.forget(set(aligner.enrolled) - {c for local in members.values() for c in local})
        for party, local in members.items():
            node = parties.node_of_party(party)
            assert node is not None  # the parties of a new epoch are connected
            aligner.enroll(node, local)
        aligner.begin(parties.epoch.digest, members, parties.registry)

    def forget(self, node: int) -> None:
        self.sums.forget(node)
        self.aligner.forget(self.clients[node])
        self.new = [at for at in self.new if at != node]
        super().forget(node)
