"""Who hosts whom: asked once; nothing but a list or a binding decides whose a client is."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from averaging_helpers import Hosted, Run, Simple
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_graph import __version__
from flower_graph.data.folders.party import Member
from flower_graph.errors import MalformedReplyError, MembershipError
from flower_graph.server.membership import Membership, check_format
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.averaging import Enrolment
from flower_graph.wire.client_errors import Kind
from flower_graph.wire.codec import Resume
from flower_graph.wire.exchange import Rejected, Replies
from flower_graph.wire.keys import CONFIG, FORMAT


class Asked(Membership):
    """Is told what SuperNodes answer, instead of asking them."""

    rounds: dict[int, Any]  # of the checkpoint that each was asked to go on from; 0: of none

    def hear(self, said: dict[int, list[int]], gone: Collection[int] = ()) -> dict[int, str]:
        """Enrol SuperNodes beside those that are there; return why some take no part."""
        online = {*self.clients, *said} - {*gone}
        self.rounds = {}

        def send(asked: dict[int, RecordDict], **_: object) -> Replies[Enrolment]:
            for node, content in asked.items():
                self.rounds[node] = content.config_records[CONFIG].get("resume-round", 0)
            return Replies({node: Enrolment(clients) for node, clients in said.items()})

        exchange: Any = SimpleNamespace(send=send)
        return {one.node_id: one.reason for one in self.ask(exchange, [*online], 1, 5.0)}


def test_who_has_lost_its_state_is_asked_to_go_on_from_its_last_checkpoint() -> None:
    members, lost = Asked(), [Rejected(2, "its state is gone", Kind.STATE_LOST)]
    members.hear({1: [0], 2: [1]})
    members.note(lost)
    members.hear({2: [1]})
    assert members.rounds == {2: 0}  # there is no checkpoint
    members.saved = Resume("a" * 32, 4, "an-attempt")
    members.note(lost)
    members.hear({})  # it does not answer
    members.saved = Resume("a" * 32, 6, "an-attempt")  # and is not in this one
    members.hear({2: [1], 3: [2]})
    assert members.rounds == {2: 4, 3: 0}
    members.hear({4: [3]})
    assert members.rounds == {4: 0}
    members.note(lost)
    members.hear({2: [1]})
    assert members.rounds == {2: 6}


def test_the_first_enrolment_binds_and_later_doubles_are_left_out_both() -> None:
    """No id and no order decides, and nobody ends a run that has begun."""
    who = Asked()
    assert who.hear({5: [0], 6: [1]}) == {}
    assert who.hear({1: [0, 1, 2]})[1].startswith("client 0 is hosted by node 5 already")
    refused = who.hear({1: [2], 9: [2, 3]})
    assert refused.keys() == {1, 9} and all("client 2" in why for why in refused.values())
    # One that claims another's too makes no double of an honest one
    assert who.hear({1: [0, 2], 9: [2]}).keys() == {1}
    assert who.clients == {5: [0], 6: [1], 9: [2]}


def test_one_that_is_back_is_no_double_of_the_one_that_is_gone() -> None:
    who = Asked()
    who.hear({5: [0], 6: [1]})
    assert who.hear({7: [0]}, gone=[5]) == {}
    assert who.clients == {6: [1], 7: [0]}
    refused = who.hear({2: [1], 3: [1]}, gone=[6])
    assert refused.keys() == {2, 3}  # both may be the one that is back


def test_a_resumed_run_knows_whose_a_number_was() -> None:
    who, renamed = Asked(), Asked()
    who.bound, renamed.bound = {0: 5, 1: 6}, {0: 5, 1: 6}
    assert who.hear({5: [0], 2: [0, 1], 6: [1]}).keys() == {2}
    assert who.clients == {5: [0], 6: [1]}
    assert renamed.hear({15: [0], 16: [1]}) == {}  # without authentication all ids are others


def test_a_checkpoint_keeps_whose_a_number_was(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    run = Run(Simple(**saving), [[0], [1, 2]], rounds=1)
    again = Run(Simple(**saving), [[0], [1, 2]], rounds=2, resume=True)
    assert again.strategy.session.members.bound == {0: run.ids[0], 1: run.ids[1], 2: run.ids[1]}
    with pytest.raises(MembershipError):  # a stranger alone would have stopped a new run
        Run(Simple(), [[0], [1, 2], [0]], rounds=2)
    held = Run(Simple(**saving), [[0], [1, 2], [0]], rounds=3, resume=True)
    assert held.strategy.session.members.clients == again.strategy.session.members.clients


# The list, and the ceiling -----------------------------------------------------------------------


def listed(*rows: tuple[set[int], int | None]) -> list[Member]:
    return [Member("", frozenset(clients), node) for clients, node in rows]


def test_who_may_speak_for_whom_by_the_list() -> None:
    who = Asked()
    who.listed = listed(({0, 1}, 5), ({2}, None), ({3}, 7))
    refused = who.hear({5: [0, 1], 6: [3], 7: [2], 8: [0, 2], 9: [4], 10: [], 4: [2]})
    assert refused.keys() == {6, 7, 8, 9, 10}
    assert who.clients == {5: [0, 1], 4: [2]}

    who = Asked()  # without ids no double is decided
    who.listed = listed(({0}, None), ({1}, None))
    with pytest.raises(MembershipError):
        who.hear({5: [0], 6: [0], 7: [1]})
    assert who.hear({5: [0], 6: [0, 1], 7: [1]}).keys() == {6}


def test_strangers_do_not_decide_which_arrays_all_send() -> None:
    class Sized(Asked):
        def form_of(self, answer: Enrolment) -> int:
            return len(answer.clients)

    who = Sized()
    who.listed = listed(({0}, None), ({1}, None))
    assert who.hear({6: [2, 3], 7: [4, 5]}).keys() == {6, 7}
    assert who.hear({5: [0], 6: [2, 3], 7: [4, 5]}).keys() == {6, 7}
    assert who.hear({8: [1], 9: [0, 1]}).keys() == {9}
    assert who.clients == {5: [0], 8: [1]}
    assert Sized().hear({1: [0], 2: [1, 2]}).keys() == {2}  # of two as common the smaller


def test_no_more_than_may_enrol() -> None:
    """Nothing decides among those of the first enrolment; later strangers are left out."""
    who = Asked()
    who.most = 2
    with pytest.raises(MembershipError):
        who.hear({5: [0], 6: [1], 7: [2]})
    assert who.hear({5: [0], 6: [1]}) == {}
    assert who.hear({7: [2]}).keys() == {7}
    assert who.hear({8: [1], 9: [2]}, gone=[6]).keys() == {9}  # the seat is the one's that is back
    assert who.clients == {5: [0], 8: [1]}


def test_one_that_fails_to_say_is_left_out_and_asked_again() -> None:
    asked: list[int] = []

    def fails(place: int, kind: str, number: int) -> None:
        if (place, kind) == (1, "query"):
            asked.append(number)
            if len(asked) < 3:
                raise OSError("not yet")

    run = Run(Simple(), [[0], [1]], 4, fails)
    assert [sorted(who.answered) for who in run.who] == [[0], [0], [0, 1], [0, 1]]
    assert "not yet" in run.rejected()[1]
    assert len(asked) == 3


# Plain ClientApps --------------------------------------------------------------------------------


def plain_app() -> ClientApp:
    """Make one that has never heard of this library, nor of ``query``."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        values = message.content["arrays"]["w"].numpy() + 1
        arrays = ArrayRecord({"w": Array(values)})
        metrics = MetricRecord({"num-examples": 1, "number": 1.0})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1, "loss": 2.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def test_a_plain_client_app_is_an_unknown_client(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Simple(), 2, rounds=3, app=plain_app())
    assert run.model == [3, 3]
    assert run.strategy.session.members.clients == {node: [] for node in run.ids}
    for report in run.reports:
        assert (report.asked, report.answered, report.rejected) == (2, 2, [])
        assert report.participation == {}
    for node in run.ids:
        assert sum(f"node {node} " in text for text in caplog.messages) == 1


# Who took part -----------------------------------------------------------------------------------


def test_draws_and_sums_do_not_depend_on_how_flower_numbers_supernodes() -> None:
    hosted = [[k] for k in range(7)]
    one, other = (
        Run(Simple(participation=0.5), hosted, 4, make_grid=partial(InProcessGrid, seed=seed))
        for seed in (0, 99)
    )
    assert set(one.ids).isdisjoint(other.ids)
    assert one.who == other.who and one.model == other.model


def test_who_failed_and_why() -> None:
    def fails(place: int, kind: str, number: int) -> Any:
        if (place, kind, number) == (1, "train", 2):
            raise OSError("the disk is full")
        if (place, kind, number) == (2, "train", 3):
            # One of its own, and one of somebody else's, for whom it cannot speak.
            said = ["4:weights are not finite", "0:gone"]
            return None, 1, {"left-out": said}
        return None

    one, two, three = Run(Simple(), [[0], [1, 2], [3, 4]], 3, fails).who
    assert one.answered == {0, 1, 2, 3, 4}
    assert two.answered == {0, 3, 4}
    assert two.failed.keys() == {1, 2}
    assert all("the disk is full" in why for why in two.failed.values())
    assert three.answered == {0, 1, 2, 3}
    assert three.failed == {4: "weights are not finite"}
    assert not (one.left_out or two.left_out or three.left_out)


# What newcomers say ------------------------------------------------------------------------------


def weighing(hosted: Hosted, examples: list[int | None], heavy: tuple[str, int] = ("", 0)) -> Run:
    """Have SuperNodes say what they weigh; that in place 1 then weighs 10^12 in one answer."""

    def bad(place: int, kind: str, number: int) -> Any:
        if kind == "query":
            return Enrolment(hosted[place], most_examples=examples[place]).to_config()
        if (place, kind, number) == (1, *heavy):
            return (None, 10**12, {}) if kind == "train" else (1.0, 10**12)
        return None

    return Run(Simple(), hosted, 3, bad)


@pytest.mark.parametrize(("most", "is_named"), [(80, False), (10**12, True)])
def test_who_says_that_nearly_all_examples_are_its_own(
    most: int, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    weighing([[0], [1]], [10, most])
    named = [text for text in caplog.messages if f"says that it has {most} of {most + 10}" in text]
    assert len(named) == is_named


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_reply_weighs_no_more_than_was_said(kind: str) -> None:
    hosted = [[0, 1], [2, 3], [4]]
    run = weighing(hosted, [2, 2, 1], (kind, 2))
    why = "num-examples is 1000000000000, its SuperNode has 2"
    why = why if kind == "train" else f"evaluate: {why}"
    assert [run.rejected(number) for number in (1, 2, 3)] == [{}, {1: why}, {}]
    # Of those that do not say what they have, it is not known.
    unknown = weighing(hosted, [None] * 3, (kind, 2))
    assert not any(report.rejected for report in unknown.reports)


# Versions ----------------------------------------------------------------------------------------


def test_another_message_format_is_refused_and_none_is_fine() -> None:
    for said in (1, 0, "1", b"1", [1], 1.5):
        entries = {"message-format": said, "flower-graph": "0.3.0\n" * 40}
        with pytest.raises(MalformedReplyError, match="message format") as error:
            check_format(RecordDict({"config": ConfigRecord(entries)}))  # type: ignore[arg-type]
        assert "\n" not in str(error.value)
    for content in ({}, {"message-format": FORMAT}):
        said = check_format(RecordDict({"config": ConfigRecord(content)}))  # type: ignore[arg-type]
        assert said == check_format(RecordDict()) == __version__
    other = {"message-format": FORMAT, "flower-graph": "9.9"}  # the log names it
    assert check_format(RecordDict({"config": ConfigRecord(other)})) == "9.9"  # type: ignore[arg-type]
