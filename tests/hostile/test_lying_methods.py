"""A server of the method that lies so that two of its sums tell what one SuperNode sent.

PPFL-GNN's repeats its means and asks all but one again; FedSCem's, whose clients measure after the
last round, has that round again without one. Of clients that trust it, it has what it wants.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import test_summed
from federation import ALL, Federation, Setup
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from lying_grid import FEDSCEM, PPFL, Lie, LyingGrid, like, unrefused
from public_helpers import ToyModel
from sum_helpers import keys_in, write_keys
from test_summed import rich_graph
from told_otherwise import (
    COUNT,
    TIMEOUT,
    VICTIM,
    Had,
    egos_app,
    egos_server,
    noting,
    public_app,
    public_server,
    signed,
)

from flower_graph import EgoNetworkClient
from flower_graph.apps.run import client_app, make_server
from flower_graph.client.state import IN_PROCESS, forget_run
from flower_graph.client.trust import trust_of
from flower_graph.errors import NoClientsError, RefusedError
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.relayed import CHECKS, REFUSAL
from flower_graph.secure.sum import server as sum_server
from flower_graph.secure.sum.server import SumResult
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedscem import MaskedEmbeddingAveraging
from flower_graph.strategies.ppfl.strategy import CommonMean
from flower_graph.wire.keys import CONFIG

LONELY = 1  # who is left out with it
SLOW = pytest.mark.slow
STEADY = 7  # of what clients measure; the contrastive loss is there after a fusion alone


class Restless(ToyModel):
    """Moves a little each round, whatever it is told."""

    def learn(self, rows: Any, targets: Any, server_round: int) -> float:
        self.vectors = self.vectors * (1 + 0.001 * server_round)
        self.rounds += 1
        return 0.5


def without_some(
    strategy: Any, app: Any, keys: Path | None, who: tuple[int, ...], after: int, rounds: int
) -> tuple[Federation, list[RoundReport]]:
    """Run all SuperNodes, and without some once so many rounds are done."""
    reports = list[RoundReport]()

    def fault(partition: int, server_round: int, kind: str) -> str:
        is_gone = partition in who and len(reports) >= after
        return "gone" if kind == "connect" and is_gone else "good"

    how = {"node_config": keys and keys_in(keys, COUNT), "state_dir": IN_PROCESS}
    grid = Federation(app, num_supernodes=COUNT, faults=fault, **how)
    try:
        with suppress(NoClientsError):  # all have refused
            strategy.start(grid, num_rounds=rounds, timeout=TIMEOUT, on_round=reports.append)
    finally:
        forget_run(grid.run.run_id)
    return grid, reports


class Repeats(CommonMean):
    """Sends the means of the second sum again and again."""

    def take(self, total: Any, contributors: Iterable[int]) -> None:
        if self.made < 2:
            super().take(total, contributors)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_keys(COUNT, tmp_path)
    return tmp_path


@pytest.fixture
def had(monkeypatch: pytest.MonkeyPatch) -> Iterator[Had]:
    """Note what all mask and a server opens, which leaves out nobody whom it need not ask."""
    monkeypatch.setattr(sum_server, "choose", lambda present, *_, **__: present)
    with noting(found := Had()):
        yield found


def sums(had: Had, size: int | None = None) -> list[SumResult]:
    """Give the sums that were opened, all or those of a size."""
    return [one for _, one in had.sums if size in (None, one.total.size)]


def sent(had: Had, place: int, total: SumResult) -> np.ndarray:
    """Give what a SuperNode put under masks in a sum."""
    number = next(number for number, one in had.sums if one is total)
    return signed(next(o.numbers for o in had.masked[number] if o.clients[0] // 2 == place))


def without(one: SumResult, other: SumResult) -> np.ndarray:
    """Take one sum away from another, as signed words."""
    return signed(one.total[: other.total.size] - other.total)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one.ravel() @ other.ravel() / np.linalg.norm(one) / np.linalg.norm(other))


# PPFL-GNN -----------------------------------------------------------------------------------------


def repeated_means(keys: Path | None, who: tuple[int, ...]) -> list[RoundReport]:
    """Repeat the means from the third round on, without some; give reports."""
    strategy = public_server(keys)
    strategy.mean = Repeats()
    return without_some(strategy, public_app(0, Restless), keys, who, 3, 5)[1]


def test_repeated_means_without_one_tell_its_rows_where_the_server_is_trusted(had: Had) -> None:
    repeated_means(None, (VICTIM,))
    assert cosine(without(sums(had)[2], sums(had)[3]), sent(had, VICTIM, sums(had)[2])) > 0.99


def test_repeated_means_without_one_give_no_second_sum(keys: Path, had: Had) -> None:
    reports = repeated_means(keys, (VICTIM,))
    assert [bool(one.skipped) for one in reports] == [False] * 3 + [True] * 2
    assert len(had.sums) == 3 and all(one.contributors.size == COUNT for one in sums(had))
    assert any("differ-by" in entry["reason"] for entry in reports[3].rejected)


@SLOW
def test_repeated_means_without_two_tell_what_both_sent_together(keys: Path, had: Had) -> None:
    """It is on the page, as is that rows that are turned to one mean resemble each other."""
    reports = repeated_means(keys, (VICTIM, LONELY))
    assert not any(one.skipped for one in reports)
    own, other = (sent(had, place, sums(had)[2]) for place in (VICTIM, LONELY))
    told = without(sums(had)[2], sums(had)[3])
    mean = sum(sent(had, place, sums(had)[2]) for place in range(COUNT))
    assert cosine(told, own + other) > 0.99
    assert cosine(mean, own) < cosine(told, own) < 0.95


# FedSCem ------------------------------------------------------------------------------------------


def measured_again(
    keys: Path | None, who: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, later: bool = False
) -> str:
    """Have the clients measure after the first round, and again without some; give refusals.

    Again is the same round again, of which nothing is trained any more; or a ``later`` one.
    """
    ask = MaskedEmbeddingAveraging.ask

    def last(self: Any, server_round: int) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(self.session, "rounds", 1)
            return ask(self, server_round if later else min(2, server_round))

    monkeypatch.setattr(MaskedEmbeddingAveraging, "ask", last)
    grid, _ = without_some(egos_server(keys), egos_app(0), keys, who, 1, 3)
    return " ".join(grid.tracebacks.values())


def measured(had: Had, who: tuple[int, ...]) -> np.ndarray:
    """Add up what some put under masks when they first measured."""
    return np.sum([sent(had, place, sums(had, 10)[0])[:STEADY] for place in who], axis=0)


def test_measurements_again_without_one_are_that_ones_where_the_server_is_trusted(
    had: Had, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_again(None, (VICTIM,), monkeypatch)
    (one, other, *_), truth = sums(had, 10), measured(had, (VICTIM,))
    assert np.array_equal(without(one, other)[:STEADY], truth) and np.count_nonzero(truth) > 4


@pytest.mark.parametrize(
    ("who", "later", "why"),
    [
        pytest.param((VICTIM,), False, "has not changed since a sum", id="one"),
        # Without two as well: what has not changed is in no sum of others
        pytest.param((VICTIM, LONELY), False, "has not changed since a sum", id="two", marks=SLOW),
        pytest.param((VICTIM,), True, "differ-by", id="one, in later rounds", marks=SLOW),
    ],
)
def test_measurements_again_without_some_are_not_told(
    who: tuple[int, ...],
    later: bool,
    why: str,
    keys: Path,
    had: Had,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = measured_again(keys, who, monkeypatch, later)
    assert [one.contributors.size for one in sums(had, 10)] == [COUNT]
    assert why in refused


@SLOW
def test_measurements_of_later_rounds_without_two_are_those_of_both_together(
    keys: Path, had: Had, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the page: models have changed by a step, and who is in the sum by two."""
    measured_again(keys, (VICTIM, LONELY), monkeypatch, later=True)
    one, other, *_ = sums(had, 10)
    assert [each.contributors.size for each in (one, other)] == [COUNT, COUNT - 2]
    assert cosine(without(one, other)[:STEADY], measured(had, (VICTIM, LONELY))) > 0.95


# Every lie, one after the other -------------------------------------------------------------------


# What the run's config hides is not sent in the clear, also where the server is trusted
PLAINER = tuple(lie for lie in FEDSCEM if lie.kind in ("a plain alignment", "plain sums"))


@pytest.mark.parametrize(
    ("setup", "lies"),
    [
        (ALL["fedscem"].with_("strategy.dropout=0.1"), PLAINER),
        (ALL["fedscem"].with_("strategy.trust=malicious-server", "strategy.dropout=0.3"), FEDSCEM),
        (ALL["deepwalk, secure, untrusted"], PPFL),
    ],
    ids=["fedscem, trusting", "fedscem", "deepwalk"],
)
def test_every_lie_to_a_method_is_refused_and_it_learns_as_if_nobody_had_lied(
    setup: Setup, lies: Sequence[Lie]
) -> None:
    config, losses = setup.load(), list[list[float]]()
    honest, other = (
        InProcessGrid(client_app(config, None), num_supernodes=setup.supernodes) for _ in range(2)
    )
    lying = LyingGrid(other, lies)
    for grid in (honest, lying):
        strategy: Any = make_server(config, grid)
        reports: list[RoundReport] = []
        strategy.start(grid, num_rounds=2, timeout=5.0, on_round=reports.append)
        losses.append([report.loss for report in reports])
    assert losses[0] == losses[1]
    assert unrefused(lying.said, lies) == {}


RELAYED = {"total", "sums"}  # records of a message with words of a sum


def changed(words: np.ndarray, every: int) -> Iterator[np.ndarray]:
    """Change one word of a sum: by one, by its top bit, or to another; give all such sums."""
    bits, one = 8 * words.itemsize, words.dtype.type(1)
    for place in range(0, words.size, every):
        other = np.random.default_rng((place, bits)).integers(0, 1 << bits, dtype=words.dtype)
        for value in (words[place] + one, words[place] ^ one << words.dtype.type(bits - 1), other):
            result = words.copy()
            result[place] = value
            yield result


class Changes(Federation):
    """Gives one SuperNode the first relayed sum with a word changed, as often as there are ways."""

    def __init__(self, app: Any, every: int, **grid: Any) -> None:
        super().__init__(app, **grid)
        self.every, self.said = every, list[bytes]()  # what is said to each change

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Try all changes, and then what was sent, which comes too late; then go on as before."""
        sent = list(messages)
        for message in sent:
            context = self.contexts[message.metadata.dst_node_id]
            found = RELAYED & message.content.array_records.keys()
            if found and context.node_config["partition-id"] == 1 and not self.said:
                journal = trust_of(context).journal
                before = journal.read_bytes()
                for content in self._changed(message.content, *found):
                    journal.write_bytes(before)  # so that each is a first trial
                    self._note(like(message, content), context)
                self._note(message, context)
                journal.write_bytes(before)
        return super().push_messages(sent)

    def _changed(self, content: RecordDict, record: str) -> Iterator[Mapping[str, Any]]:
        """Change each word of the sum, and of its checks, in each way."""
        arrays, config = content.array_records[record], content.config_records[CONFIG]
        for key, array in arrays.items():
            for words in changed(array.numpy(), self.every):
                yield {record: ArrayRecord({**arrays, key: Array(words)})}
        if checks := config.get("sums-checks"):
            assert len(checks) == 8 * CHECKS  # type: ignore[arg-type]
            for words in changed(np.frombuffer(checks, "<u8"), self.every):  # type: ignore[arg-type]
                yield {CONFIG: ConfigRecord({**config, "sums-checks": words.tobytes()})}

    def _note(self, message: Message, context: Context) -> None:
        reply = self._handle(message, context)
        words = reply.error.reason if reply.has_error() else "it is answered"
        self.said.append(re.sub(rb" [(].*[)]$", b"", words.encode()))  # the line of a simulation


def said_by_users(kind: int, every: int, folder: Path) -> list[bytes]:
    """Run nFedGNN with one first layer, where one user's features are of two kinds."""
    data = rich_graph()
    if kind:
        data.x[-1] = -3 * data.x[-1] + 1
    grid = partial(Changes, every=max(1, every // 150))  # of few words
    how = {"is_masked": True, "distrusts": True, "rounds": 3}
    run: Any = test_summed.Summed(data, grid=grid, supernodes=5, **how)  # type: ignore[arg-type]
    assert len(run.reports) == 3 and not any(report.skipped for report in run.reports)
    assert set(run.grid.said) == {f"RefusedError: {REFUSAL}".encode()}
    return list(run.grid.said)


class Egos(Changes):
    """FedSCem's clients answer with masked words: noted is what they make of a sum."""

    def _note(self, message: Message, context: Context) -> None:
        fuse = EgoNetworkClient._fuse

        def noted(client: Any, cohort: Any, group: Any, *given: Any) -> Any:
            contrast, is_unread = fuse(client, cohort, group, *given)
            assert is_unread and bool(contrast.isnan().all()), "it goes on alone"
            self.said.append(group.embed().numpy().tobytes())
            raise RefusedError("it is known")  # so that nothing of it is kept

        with patch.object(EgoNetworkClient, "_fuse", noted):
            assert self._handle(message, context).has_error()


def said_by_egos(kind: int, every: int, folder: Path) -> list[bytes]:
    """Run FedSCem, where one client's graph is of two kinds."""
    keys = folder / str(kind)
    keys.mkdir()
    how = {"node_config": write_keys(COUNT, keys), "state_dir": IN_PROCESS}
    grid = Egos(egos_app(kind), every, num_supernodes=COUNT, **how)
    try:
        egos_server(keys).start(grid, num_rounds=2, timeout=5.0)
    finally:
        forget_run(grid.run.run_id)
    return grid.said


WHOLE = pytest.param(1, marks=(pytest.mark.slow, pytest.mark.release))


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("every", [600, WHOLE])
@pytest.mark.parametrize("said", [said_by_users, said_by_egos])
def test_a_changed_sum_is_answered_alike_whatever_it_is(
    said: Any, every: int, tmp_path: Path
) -> None:
    one, other = said(0, every, tmp_path), said(1, every, tmp_path)
    assert one == other and len(one) > 15 and len(set(one)) == 1
