"""The audit's deviating server: what its lies open, in the setting that trusts it not to lie."""

from __future__ import annotations

import pytest
from federation import ALL, Setup

from flower_graph.apps.cli.audit import _deviating_run
from flower_graph.audit.deviating import NOTES, Deviation, all_notes
from flower_graph.audit.scores import Finding
from flower_graph.method.registry import method_of

LIES = {"fedscem": 5, "deepwalk, secure": 3, "fedscem, plain": 0, "deepwalk": 0, "nfedgnn": 0}


def tried(name: str, words: str) -> Finding:
    """Let the server of a run lie in the one way whose name has these words."""
    (found,) = all_tried(ALL[name], words)
    return found


def all_tried(setup: Setup, words: str = "") -> list[Finding]:
    """Let the server of a run lie in all ways whose name has these words."""
    config = setup.load()
    method = method_of(config)
    lies = [one for one in method.audit().deviations(config, method) if words in one.name]
    return [found for lie in lies for found in _deviating_run(config, lie, setup.supernodes)]


@pytest.mark.parametrize("name", LIES)
def test_what_hides_something_is_attacked(name: str) -> None:
    config = ALL[name].load()
    method = method_of(config)
    assert len(method.audit().deviations(config, method)) == LIES[name]


@pytest.mark.parametrize(
    "name", ["fedscem", pytest.param("deepwalk, secure", marks=pytest.mark.slow)]
)
def test_two_stories_about_who_dropped_out_open_no_vector(name: str) -> None:
    found = tried(name, "server: different stories")
    assert (found.success, found.n) == (0, ALL[name].supernodes)


@pytest.mark.parametrize("words", ["only one", "a threshold of 1"])
def test_what_a_server_tells_that_clients_can_see_through_opens_no_vector(words: str) -> None:
    assert tried("fedscem", words).success == 0


@pytest.mark.parametrize("words", ["by answers", "that it chose"])
def test_the_semi_honest_alignment_trusts_the_server(words: str) -> None:
    assert tried("fedscem", words).success == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "lies"),
    [
        (ALL["fedscem"].with_("strategy.dropout=0.3", "strategy.trust=malicious-server"), 5),
        (ALL["deepwalk, secure, untrusted"], 3),
    ],
    ids=["fedscem", "deepwalk"],
)
def test_clients_that_do_not_trust_the_server_show_it_nothing(setup: Setup, lies: int) -> None:
    """Each lie is told (else `_deviating_run` fails), and opens no vector and no identity."""
    found = all_tried(setup)
    assert len(found) == lies
    assert all(one.success <= one.chance for one in found), found


def test_a_run_that_ends_before_its_server_lies_shows_nothing() -> None:
    lie = Deviation()
    lie.name, lie.patch = "never", lambda strategy: None  # type: ignore[method-assign]
    setup = ALL["fedscem"]
    with pytest.raises(AssertionError, match="before"):
        _deviating_run(setup.load(), lie, setup.supernodes)


def test_readers_are_told_that_the_server_lied() -> None:
    assert all_notes(["a"], ["who has what"]) == ["a"]
    assert all_notes(["a"], ["deviating server: x"]) == ["a", *NOTES]
