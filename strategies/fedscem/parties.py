"""Steps and checks of FedSCem's clients at a SuperNode that does not trust the server."""

from __future__ import annotations

from flower_graph.errors import RefusedError
from flower_graph.secure.align.blinded import UnionRequest
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.parties.alignment import ProvedUnionRequest, VerifiedAlignmentClient
from flower_graph.secure.parties.differences import digest_of
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.parties.messages import Ready
from flower_graph.secure.parties.party import PartyClient
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import MaskedReply, MaskRequest
from flower_graph.strategies.fedscem.ego_secrets import begin_alignment
from flower_graph.strategies.fedscem.messages import EgoRequest, union_terms
from flower_graph.wire.numpy_client import Config

TABLE = b"table of tokens"  # in the journal


def answer_party(
    party: PartyClient, aligner: VerifiedAlignmentClient, action: str, config: Config
) -> Config:
    """Answer an exchange without vectors."""
    entries = party.answer(action, config)
    if action == "sum_epoch":
        begin_alignment(party, aligner)
    return entries


def add_table(host: SumClient, aligner: AlignmentClient, config: Config) -> MaskedReply:
    """Process the key-holders' answers, and add the table of tokens to a masked sum."""
    union, mask = UnionRequest.from_config(config), MaskRequest.from_config(config)
    aligner.finish(union)
    ready = set(aligner.finished)
    present = [client for client in mask.clients.tolist() if client in ready]
    return host.mask(mask, present, aligner.sketch(union.cells, present), union_terms(union.epoch))


def add_proved_table(
    party: PartyClient, aligner: VerifiedAlignmentClient, config: Config
) -> MaskedReply:
    """Check the key-holders' answers, and add the table of tokens to a masked sum."""
    union, mask = ProvedUnionRequest.from_config(config), MaskRequest.from_config(config)
    party.receive(mask, Ready.from_config(config), None)
    aligner.finish_verified(union)
    # Two sums of tables in one alignment, one of them without us, differ by our table.
    Journal(party.trust.journal).contribute(union.epoch, TABLE, party.trust.run)
    table = aligner.sketch(union.cells, aligner.finished)
    return party.mask(table, union_terms(union.epoch), digest_of([table]))


def check_request(
    request: EgoRequest, party: PartyClient, aligner: VerifiedAlignmentClient
) -> None:
    """Refuse requests that contradict what the clients have agreed on."""
    if request.mask is None or request.ready is None or request.ring is None:
        raise RefusedError("a vector is asked for without masks: nothing is sent")
    if request.model is not None:
        raise RefusedError("weights are asked for, whose sums the server would read")
    if request.clients.tolist() != aligner.finished:
        raise RefusedError(
            f"clients {request.clients.tolist()!s:.60} are asked, {aligner.finished!s:.60} are "
            "aligned here: two sums over different clients could differ by a single client's vector"
        )
    party.receive(request.mask, request.ready, request.ring)
