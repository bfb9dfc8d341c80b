"""Local steps that a method states, against those that its clients take."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from federation import ALL, METHODS, tried

from flower_graph.apps.reproduce.runs import steps_of, train
from flower_graph.ops.adam import Adam

COUNTED = (
    *("fedscem, minus", "fedscem", "fedscem, batches", "fedscem, self-training"),
    *("fedgls", "fedgls, proto", "gat", "fedgta", "fedpub", "ditto"),
)


@pytest.mark.parametrize("name", tried(COUNTED, fast=COUNTED[:1]))
def test_clients_take_the_steps_that_their_method_states(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []

    def counting(step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: object, *given: Any, **named: Any) -> Any:
            moves = named.get("moves")  # Clients that have such a batch
            share = 1.0 if moves is None else float(moves.float().mean())
            taken.append(share * math.prod(getattr(self, "clients", ())))  # of a group's step
            return step(self, *given, **named)

        return counted

    monkeypatch.setattr(Adam, "step", counting(Adam.step))
    several = () if name == "gat" else ("strategy.local_epochs=3",)
    config = ALL[name].load("rounds=2", *several)
    curves = train(config)
    steps = sum(taken) / steps_of(config)[0]
    assert steps == pytest.approx(curves.steps[-1]) and steps > 2


def test_every_other_method_states_its_steps() -> None:
    assert steps_of(METHODS["lpgnn"].load())[1] == 0
    for name in METHODS.keys() - {*COUNTED, "lpgnn"}:
        assert steps_of(METHODS[name].load())[1] >= 1, name
