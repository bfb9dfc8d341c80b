"""A client that never answers, or after the deadline; machines whose clocks disagree."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest
from federation import METHODS, ONCE, Federation, at
from flwr.app import Message

from flower_graph.flower_compat import flower_message, validate_message

ROUNDS, BAD = 6, 3
RUN = (f"rounds={ROUNDS}", "strategy.timeout=0.1")


@pytest.mark.parametrize("name", ONCE)
def test_a_client_that_never_answers(name: str, tmp_path: Path) -> None:
    # Whether it takes messages and says nothing or is not there at all: the same figures.
    setup = METHODS[name]
    silent = setup.run(tmp_path / "silent", *RUN, faults=at("silent"))
    gone = setup.run(tmp_path / "gone", *RUN, faults=at("gone"))
    assert silent.figures == pytest.approx(gone.figures, nan_ok=True, abs=1e-6)
    assert all("no reply within 0.1 s" in str(r.rejected) for r in silent.reports[1:-1])


@pytest.mark.parametrize("name", ONCE)
def test_an_answer_after_the_deadline(name: str, tmp_path: Path) -> None:
    setup = METHODS[name]
    late = setup.run(tmp_path / "late", *RUN, faults=at("late", {BAD}, "train"))
    lost = setup.run(tmp_path / "lost", *RUN, faults=at("lost", {BAD}, "train"))
    assert late.figures == pytest.approx(lost.figures, nan_ok=True, abs=1e-6)
    missed = [number for number, one in enumerate(late.who, start=1) if one.failed]
    assert missed == [BAD - setup.late]


# Clocks -----------------------------------------------------------------------------------------

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
