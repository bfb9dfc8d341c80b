"""Who takes part in a round, whoever hosts whom; clients that are silent, late, new, or killed."""

import itertools
import math
import random
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from federation import (
    ALL,
    EACH,
    EVERY,
    METHODS,
    ONCE,
    Done,
    Federation,
    Setup,
    assert_close,
    at,
    later,
    tried,
)
from flwr.app import Message

from flower_graph.flower_compat import flower_message, validate_message

WRONG = {2: "error", 4: "empty", 6: "lost"}  # what one SuperNode does, by round


def checked(done: Done, clients: int) -> Done:
    """Hold every round against what must hold in each."""
    for report, who in zip(done.reports, done.who, strict=True):
        parts = [who.answered, set(who.failed), set(who.left_out)]
        together = set().union(*parts)
        assert sum(map(len, parts)) == len(together), "a client in two places"
        assert len(together) == clients, f"round {report.round}"
        assert len(who.answered) == report.answered, f"round {report.round}"
        assert all(reason for reason in [*who.failed.values(), *who.left_out.values()])
    return done


def missed(done: Done) -> list[int]:
    """List the rounds in which a client failed."""
    return [number for number, who in enumerate(done.who, start=1) if who.failed]


def clients_of(setup: Setup) -> int:
    """Count the clients: users of nFedGNN are nodes."""
    return {"nfedgnn/cora": 90, "lpgnn/cora-linqs": 90}.get(setup.config, setup.supernodes)


# Where the server is not trusted, nodes are summed by how many SuperNodes hold them
FREE = [one for one in EVERY if "untrusted" not in str(one.values[0])]
# The secure consensus refuses participation
SOME = [one for one in FREE if "secure" not in str(one.values[0])]


def assert_any_assignment(setup: Setup, out: Path, *overrides: str) -> list[Done]:
    """One SuperNode for all clients, some for each, one for each."""
    one, two, each = done = [
        checked(setup.run(out / str(n), "rounds=3", *overrides, supernodes=n), clients_of(setup))
        for n in (1, 2, setup.supernodes)
    ]
    for other in (one, two):
        assert_close(other, each, 1e-4, setup.atol)
    return done


@pytest.mark.parametrize("name", FREE)
def test_any_assignment_gives_the_same(name: str, tmp_path: Path) -> None:
    assert_any_assignment(ALL[name], tmp_path)


@pytest.mark.parametrize("name", SOME)
def test_some_of_the_clients_whoever_hosts_them(name: str, tmp_path: Path) -> None:
    setup, share = ALL[name], "strategy.participation=0.25"
    for done in assert_any_assignment(setup, tmp_path, share):
        # A masked sum of one client would be that client's
        least = 2 if "fedscem" in name else 1
        wanted = max(least, round(clients_of(setup) / 4))
        for who in done.who:
            assert 1 <= len(who.answered) <= wanted
            assert set(who.left_out.values()) == {"not drawn"}
        assert len({frozenset(who.answered) for who in done.who}) > 1


@pytest.mark.parametrize("name", later(EACH))
def test_what_cannot_be_used_is_named_and_costs_no_more_than_silence(
    name: str, tmp_path: Path
) -> None:
    """A client that fails before its work, has nothing in its reply, or whose reply is lost."""
    setup = METHODS[name]

    def wrong(partition: int, server_round: int, kind: str) -> str:
        is_asked = partition == 1 and kind == "train"
        return WRONG.get(server_round - setup.late, "good") if is_asked else "good"

    def silent(*message: Any) -> str:
        return "silent" if wrong(*message) == "error" else wrong(*message)

    run = ("rounds=7", "strategy.timeout=0.1")
    done = checked(setup.run(tmp_path / "bad", *run, faults=wrong), clients_of(setup))
    assert missed(done) == list(WRONG)
    assert all(done.reports[number - 1].rejected for number in WRONG)
    assert done.who[-1].answered == done.who[0].answered, "it takes part again"
    other = setup.run(tmp_path / "silent", *run, faults=silent)
    assert any("no reply within 0.1 s" in str(report.rejected) for report in other.reports)
    assert other.figures == pytest.approx(done.figures, nan_ok=True, abs=1e-6)


# Of FedSage+ a newcomer trains its generator first.
FEDSCEM = [f"fedscem, {name}" for name in ("plain", "local-sage", "fed-sage")]
NEWCOMERS = [*METHODS, *FEDSCEM]


@pytest.mark.parametrize("name", later(tried(NEWCOMERS, slow=NEWCOMERS)))
def test_a_newcomer_takes_part_from_then_on(name: str, tmp_path: Path) -> None:
    setup, comes = ALL[name], at("gone", range(3), "connect")
    run = ("rounds=5", "strategy.timeout=0.1", f"strategy.min_nodes={setup.supernodes - 1}")
    done = setup.run(tmp_path, *run, faults=comes)
    assert not any(report.rejected for report in done.reports)
    counts = [report.answered for report in done.reports]
    assert counts[0] < counts[-1] == clients_of(setup)


@pytest.mark.parametrize("name", later(EACH))
def test_one_that_leaves_is_named_and_the_others_go_on(name: str, tmp_path: Path) -> None:
    setup, leaves = METHODS[name], at("gone", range(3, 99), "connect")
    run = ("rounds=5", "strategy.timeout=0.1")
    done = checked(setup.run(tmp_path, *run, faults=leaves), clients_of(setup))
    assert not any(report.rejected or report.skipped for report in done.reports)
    first, *_, last = done.who
    assert not last.failed and set(last.left_out.values()) == {"not connected"}
    assert last.answered and first.answered == last.answered | last.left_out.keys()
    assert math.isfinite(done.reports[-1].loss)


ROUNDS, BAD = 6, 3
RUN = (f"rounds={ROUNDS}", "strategy.timeout=0.1")


@pytest.mark.parametrize("name", later(ONCE))
def test_an_answer_after_the_deadline(name: str, tmp_path: Path) -> None:
    setup = METHODS[name]
    late = setup.run(tmp_path / "late", *RUN, faults=at("late", {BAD}, "train"))
    lost = setup.run(tmp_path / "lost", *RUN, faults=at("lost", {BAD}, "train"))
    assert late.figures == pytest.approx(lost.figures, nan_ok=True, abs=1e-6)
    assert missed(late) == [BAD - setup.late]


HOURS = (-3, 0, 26)  # how far the clients' clocks are off


class OffClocks(Federation):
    """Clients whose clocks are off, and of Flower's SuperLink what looks at times."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids, now = [], flower_message.now
        for message in messages:
            node = self.contexts[message.metadata.dst_node_id]
            off = timedelta(hours=HOURS[int(node.node_config["partition-id"]) % len(HOURS)])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(flower_message, "now", lambda off=off: now() + off)
                ids += super().push_messages([message])
            # As the SuperLink does with a reply that is no longer valid
            said = validate_message(self._replies[ids[-1]], True)
            if any("ttl" in text.lower() for text in said):
                del self._replies[ids[-1]]
        return ids


@pytest.mark.parametrize("name", ONCE)
def test_clocks_that_disagree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = METHODS[name].with_("rounds=4", "strategy.timeout=5")
    right = setup.run(tmp_path / "right")
    monkeypatch.setattr("federation.Federation", OffClocks)
    off = setup.run(tmp_path / "off")
    assert off.figures == pytest.approx(right.figures, nan_ok=True, abs=0)
    assert off.result["rejected"] == 0


@pytest.mark.parametrize("name", later(ONCE))
def test_killed_in_mid_training(name: str, tmp_path: Path) -> None:
    """Another client in each round from the second to the sixth."""

    def killed(partition: int, server_round: int, kind: str) -> str:
        due = 2 <= server_round <= 6 and kind == "train" and partition == server_round - 2
        return "killed" if due else "good"

    setup, draw = METHODS[name].with_("rounds=9", "strategy.timeout=0.3"), random.Random(0)
    # From before anything is read to after everything is written
    moments = (10 ** draw.uniform(-3, -0.7) for _ in itertools.count())
    done = setup.run(tmp_path / "o", faults=killed, kill_after=moments)
    assert [report.round for report in done.reports] == list(range(1, 10))
    taken = done.who
    away = missed(done)
    assert away and set(away) <= set(range(2 - setup.late, 8))
    # Whoever was killed is back, with a state that is whole: of before the message or after it.
    everyone = taken[0].answered | taken[0].failed.keys()
    assert taken[-1].answered == everyone and not taken[-1].failed


# What a client is busy with when it is killed
STAGES = {
    "fedscem": ("train", "train.sum_unmask"),
    "deepwalk, secure": ("train", "train.sum_unmask"),
}
FAST = ("fedscem", "train.sum_unmask", 0.1)
CASES = [
    pytest.param(*case, marks=() if case == FAST else pytest.mark.slow)
    for name, stages in STAGES.items()
    for case in itertools.product([name], stages, [0.001, 0.1])
]


# After a millisecond it is at its begin.
@pytest.mark.parametrize(("name", "stage", "after"), CASES)
def test_killed_between_the_stages(name: str, stage: str, after: float, tmp_path: Path) -> None:
    faults = at("killed", {BAD}, stage)
    words = (f"rounds={ROUNDS}", "strategy.timeout=0.5")
    done = ALL[name].run(tmp_path / "o", *words, faults=faults, kill_after=itertools.repeat(after))
    assert done.grid.killed, f"there is no such stage: {sorted(done.grid.kinds)}"
    taken = done.who
    # Before its vector came it is missing in the sum; after that its masks are taken off with the
    # others' shares. It is named, and part of the last sums again.
    assert any(report.rejected for report in done.reports)
    assert stage != "train" or any(one.failed for one in taken)
    assert taken[-1].answered == taken[0].answered
    assert all(math.isfinite(report.loss) for report in done.reports[-2:])
