"""FedSCem whose clients do not trust the server."""

import re

import pytest
from ego_helpers import start_of
from ego_strategy_helpers import assert_same, faulty, run
from federation import METHODS, Federation, round_of
from flwr.app import Array, ArrayRecord, Message

from flower_graph import EgoNetworkClient
from flower_graph.errors import ConfigError
from flower_graph.flower_compat import recorddict_from_proto, recorddict_to_proto
from flower_graph.secure.parties.identity import TrustSettings, new_identity
from flower_graph.secure.parties.registry import Registry
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.keys import RING_WORD

UNTRUSTED = METHODS["fedscem"].with_("strategy.trust=malicious-server")
DEAL = [[0, 1, 2], [3, 4], [5], [6, 7, 8], [9, 10], [11]]


@pytest.fixture
def parties(tmp_path):
    registry, keys = Registry({}, 3), [tmp_path / f"key-{part}" for part in range(len(DEAL))]
    for path, places in zip(keys, DEAL, strict=True):
        clients = [range(100 + place, 101 + place) for place in places]
        registry = registry.with_party(new_identity(path), clients)
    registry.write(tmp_path / "registry.json")

    def client(context, egos, settings, **options):
        part = int(context.node_config["partition-id"])
        files = {"identity-key": str(keys[part]), "registry": str(tmp_path / "registry.json")}
        return EgoNetworkClient(
            context, egos, settings, trust=TrustSettings.of(files, context.run_id), **options
        )

    return {
        "registry": tmp_path / "registry.json",
        "client_options": {"client": client},
        "supernodes": len(DEAL),
        "deal": DEAL,
    }


def test_results_are_those_of_a_trusted_server_for_one_exchange_more(parties):
    trusted = run(supernodes=6, deal=DEAL, make_grid=Federation)
    done = run(**parties, make_grid=Federation)
    assert_same(done, trusted, atol=0)
    assert done.strategy.session.num_slots == trusted.strategy.session.num_slots > 10
    for number in (2, 3, 4):
        ours, theirs = (
            {one.metadata.message_type for one, _ in grid.exchanged if round_of(one) == number}
            for grid in (done.grid, trusted.grid)
        )
        assert ours - theirs == {"train.sum_list"} and theirs <= ours


def with_a_model(content):
    content["config"]["shares-model"] = True
    content["model"] = ArrayRecord({"weights": Array(start_of().numpy())})


def telling(**entries):
    return lambda content: content["config"].update(entries)


BACK = {"resume-round": 1, "resume-attempt": "another"}
# Round and type of a message, what a lie changes in it, and what the client says
LIES = {
    "unmasked": (2, "train", lambda one: one["config"].pop(RING_WORD), "without masks"),
    "with a model": (2, "train", with_a_model, "weights are asked for"),
    "of one": (2, "train", telling(clients=(100).to_bytes(8, "little")), "clients .100. are asked"),
    "for others": (1, "query", telling(alignment="psi"), "takes part in verified alone"),
    "to go back": (3, "train", telling(**BACK), "loads no checkpoint from before"),
}


class Lying(Federation):
    """Tells the first SuperNode each lie before what is true; asks for a table of tokens twice."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.heard = {}

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            meta = message.metadata
            if self.contexts[meta.dst_node_id].node_config["partition-id"] != 0:
                continue
            at = int(meta.group_id), meta.message_type
            for lie, change in [(lie, one[2]) for lie, one in LIES.items() if one[:2] == at]:
                told = self.query if lie == "to go back" else message
                content = recorddict_from_proto(recorddict_to_proto(told.content))
                change(content)
                self.heard[lie] = self._told(told, content)
            if meta.message_type == "query":
                self.query = message
        result = super().push_messages(messages)
        if messages[0].metadata.message_type == "train.union":
            (union,) = [m for m in messages if self._place(m) == 0]
            again = recorddict_from_proto(recorddict_to_proto(union.content))
            self.heard["again"] = self._told(union, again)
        return result

    def _place(self, message):
        return self.contexts[message.metadata.dst_node_id].node_config["partition-id"]

    def _told(self, message, content):
        meta = message.metadata
        lie = Message(content, meta.dst_node_id, meta.message_type, group_id=meta.group_id)
        (number,) = InProcessGrid.push_messages(self, [lie])
        reply = self._replies.pop(number)
        return reply.error.reason if reply.has_error() else "it answered"


def test_lies_are_refused_and_the_run_goes_on_as_if_there_were_none(parties):
    done = run(**parties, make_grid=Lying)
    for lie, (*_, says) in LIES.items():
        assert re.search(says, done.grid.heard[lie]), (lie, done.grid.heard[lie])
    assert re.search("is not after|masked already", done.grid.heard["again"])
    assert_same(done, run(supernodes=6, deal=DEAL), atol=0)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("strategy.aggregation=plain", "vector"),
        ("strategy.alignment=plain", "identities"),
        ("strategy.model_sharing=fedavg", "weights"),
        ("strategy.participation=0.5", "changing"),
        ("strategy.name=fedavg", "server"),
        ("partition.clients=4", "5.*masked"),
    ],
)
def test_settings_that_a_server_could_read_clients_by_are_refused(setting, says):
    with pytest.raises(ConfigError, match=says):
        UNTRUSTED.load(setting)


def test_who_joins_later_is_aligned_with_all(parties):
    script = {(5, "connect", 1): "gone"}
    done = run(**parties, rounds=3, make_grid=faulty(script))
    sums = done.strategy.session.sums
    # All are aligned; of each sum one is left out, as six SuperNodes differ from five by one.
    assert done.answered == [11, 11, 11] and sums.server.epoch.number == 1
    assert len(sums.server.members) == 6
