"""A server of the method that lies: in each entry, by repeated means, by sums that it changed."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import test_summed
from federation import ALL, Federation, Setup
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from lying_grid import FEDSCEM, PPFL, Lie, LyingGrid, like, unrefused
from sum_helpers import keys_in, write_keys
from test_summed import rich_graph
from told_otherwise import COUNT, TIMEOUT, VICTIM, app_of, server_of

from flower_graph import EgoNetworkClient
from flower_graph.apps.run import client_app, make_server
from flower_graph.client.trust import trust_of
from flower_graph.errors import CHANGED_SUM, NoClientsError, RefusedError
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.sum import server as sum_server
from flower_graph.simulation import InProcessGrid
from flower_graph.storage.files import IN_PROCESS
from flower_graph.strategies.fedscem import MaskedEmbeddingAveraging
from flower_graph.strategies.fedscem.algorithm import EgoGroup
from flower_graph.strategies.ppfl.algorithm import CommonMean


def without_one(name: str, strategy: Any, keys: Path, after: int, rounds: int) -> Any:
    """Run all SuperNodes, and without one once so many rounds are done: the grid, and reports."""
    reports = list[RoundReport]()

    def fault(partition: int, server_round: int, kind: str) -> str:
        is_gone = partition == VICTIM and len(reports) >= after
        return "gone" if kind == "connect" and is_gone else "good"

    how = {"node_config": keys_in(keys, COUNT), "state_dir": IN_PROCESS}
    grid = Federation(app_of(name), num_supernodes=COUNT, faults=fault, **how)
    with suppress(NoClientsError):  # all have refused
        strategy.start(grid, num_rounds=rounds, timeout=TIMEOUT, on_round=reports.append)
    return grid, reports


class Repeats(CommonMean):
    """Sends the means of the second sum again and again."""

    def take(self, total: Any, contributors: Iterable[int]) -> None:
        if self.made < 2:
            super().take(total, contributors)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make keys, and a server that leaves out nobody whom it need not ask."""
    monkeypatch.setattr(sum_server, "choose", lambda present, *_, **__: present)
    write_keys(COUNT, tmp_path, each=1)
    return tmp_path


def test_repeated_means_without_one_give_no_second_sum(keys: Path) -> None:
    """Where the server is trusted, the difference of both has the SuperNode's rows."""
    strategy = server_of("deepwalk", keys)
    strategy.mean = Repeats()
    _, reports = without_one("deepwalk", strategy, keys, 3, 5)
    assert [bool(one.skipped) for one in reports] == [False] * 3 + [True] * 2
    assert any("differ-by" in entry["reason"] for entry in reports[3].rejected)


def test_measurements_again_without_one_are_not_told(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedSCem's clients measure after the last round, and are asked for it again."""
    ask = MaskedEmbeddingAveraging.ask

    def last(self: Any, server_round: int) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(self.session, "rounds", 1)
            return ask(self, min(2, server_round))

    monkeypatch.setattr(MaskedEmbeddingAveraging, "ask", last)
    grid, _ = without_one("fedscem", server_of("fedscem", keys), keys, 1, 3)
    assert len(grid.tracebacks) == COUNT - 1
    assert all("has not changed since a sum" in said for said in grid.tracebacks.values())


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


class Changes:
    """Gives one SuperNode the first relayed sum with a word changed, as often as there are ways."""

    def __init__(self, every: int) -> None:
        self.every, self.said = every, list[bytes]()  # what is said to each change

    def __call__(self, grid: Federation, sent: list[Message]) -> list[Message]:
        """Try all changes, and then what was sent, which comes too late; then go on as before."""
        for message in sent:
            context = grid.contexts[message.metadata.dst_node_id]
            found = RELAYED & message.content.array_records.keys()
            if found and context.node_config["partition-id"] == 1 and not self.said:
                journal = trust_of(context).journal.path
                before = journal.read_bytes()
                for content in self._changed(message.content, *found):
                    journal.write_bytes(before)  # so that each is a first trial
                    self._note(grid, like(message, content), context)
                self._note(grid, message, context)
                journal.write_bytes(before)
        return sent

    def _changed(self, content: RecordDict, record: str) -> Iterator[Mapping[str, Any]]:
        """Change each word of the sum, and of its checks, in each way."""
        arrays = content.array_records[record]
        for key, array in arrays.items():
            for words in changed(array.numpy(), self.every):
                yield {record: ArrayRecord({**arrays, key: Array(words)})}

    def _note(self, grid: Federation, message: Message, context: Context) -> None:
        reply = grid._handle(message, context)
        words = reply.error.reason if reply.has_error() else "it is answered"
        self.said.append(re.sub(rb" [(].*[)]$", b"", words.encode()))  # the line of a simulation


def said_by_users(kind: int, every: int) -> list[bytes]:
    """Run nFedGNN with one first layer, where one user's features are of two kinds."""
    data = rich_graph()
    if kind:
        data.x[-1] = -3 * data.x[-1] + 1
    changes = Changes(max(1, every // 150))  # of few words
    how = {"is_masked": True, "distrusts": True, "rounds": 3}
    run: Any = test_summed.Summed(data, tells=changes, supernodes=5, **how)  # type: ignore[arg-type]
    assert len(run.reports) == 3 and not any(report.skipped for report in run.reports)
    assert set(changes.said) == {f"RefusedError: {CHANGED_SUM}".encode()}
    return changes.said


class Egos(Changes):
    """FedSCem's clients answer with masked words: noted is what they make of a sum."""

    def _note(self, grid: Federation, message: Message, context: Context) -> None:
        means, fuse = EgoNetworkClient._means, EgoGroup.fuse

        def read(*given: Any) -> Any:
            shared, is_unread = means(*given)
            assert is_unread and shared is None, "it goes on alone"
            return shared, is_unread

        def noted(group: Any, *given: Any) -> Any:
            contrast: Any = fuse(group, *given)
            assert bool(contrast.isnan().all())
            self.said.append(group.embed().numpy().tobytes())
            raise RefusedError("it is known")  # so that nothing of it is kept

        with patch.object(EgoNetworkClient, "_means", read), patch.object(EgoGroup, "fuse", noted):
            assert grid._handle(message, context).has_error()


def said_by_egos(every: int, folder: Path) -> list[bytes]:
    egos, how = Egos(every), {"node_config": write_keys(COUNT, folder, each=1)}
    how |= {"num_supernodes": COUNT, "state_dir": IN_PROCESS, "tells": egos}  # type: ignore[dict-item]
    grid = Federation(app_of("fedscem"), **how)  # type: ignore[arg-type]
    server_of("fedscem", folder).start(grid, num_rounds=2, timeout=5.0)
    return egos.said


WHOLE = pytest.param(1, marks=pytest.mark.release)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("every", [600, WHOLE])
def test_a_changed_sum_is_answered_alike_whatever_it_is(every: int) -> None:
    one, other = said_by_users(0, every), said_by_users(1, every)
    assert one == other and len(one) > 15 and len(set(one)) == 1


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("every", [pytest.param(20, marks=pytest.mark.slow), WHOLE])
def test_a_changed_sum_of_embeddings_is_fused_with_nothing(every: int, tmp_path: Path) -> None:
    said = said_by_egos(every, tmp_path)
    assert len(said) > 15 and len(set(said)) == 1
