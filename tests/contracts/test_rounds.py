"""Who takes part in a round, and that it does not matter which SuperNode hosts whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from federation import ALL, EACH, EVERY, METHODS, Done, Setup, assert_close, at, tried

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


def clients_of(setup: Setup) -> int:
    """Count the clients: users of nFedGNN are nodes."""
    return {"nfedgnn/cora": 90}.get(setup.config, setup.supernodes)


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


@pytest.mark.parametrize("name", SOME)
def test_who_takes_part_changes(name: str, tmp_path: Path) -> None:
    setup = ALL[name]
    done = checked(setup.run(tmp_path, "rounds=3", "strategy.participation=0.5"), clients_of(setup))
    half = clients_of(setup) / 2
    for who in done.who:
        assert half - 1 <= len(who.answered) <= half + 1
    assert len({frozenset(who.answered) for who in done.who}) > 1


@pytest.mark.parametrize("name", EACH)
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
    missed = [number for number, who in enumerate(done.who, start=1) if who.failed]
    assert missed == list(WRONG)
    assert all(done.reports[number - 1].rejected for number in WRONG)
    assert done.who[-1].answered == done.who[0].answered, "it takes part again"
    other = setup.run(tmp_path / "silent", *run, faults=silent)
    assert other.figures == pytest.approx(done.figures, nan_ok=True, abs=1e-6)


# Of FedSage+ a newcomer trains its generator first.
FEDSCEM = [f"fedscem, {name}" for name in ("plain", "local-sage", "fed-sage")]
NEWCOMERS = [*METHODS, *FEDSCEM]


@pytest.mark.parametrize("name", tried(NEWCOMERS, slow=NEWCOMERS))
def test_a_newcomer_takes_part_from_then_on(name: str, tmp_path: Path) -> None:
    setup, comes = ALL[name], at("gone", range(3), "connect")
    run = ("rounds=5", "strategy.timeout=0.1", f"strategy.min_nodes={setup.supernodes - 1}")
    done = setup.run(tmp_path, *run, faults=comes)
    assert not any(report.rejected for report in done.reports)
    counts = [report.answered for report in done.reports]
    assert counts[0] < counts[-1] == clients_of(setup)
