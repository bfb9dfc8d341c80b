"""Every method on small federations, and one grid on which anything can go wrong."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from safetensors.torch import load_file

from flower_graph.apps.run import client_app, run_server
from flower_graph.config.common import RunConfig
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of
from flower_graph.outputs.files import Embeddings
from flower_graph.records.participation import numbers
from flower_graph.records.rounds import RoundReport, read_reports
from flower_graph.secure.node_config import FEWEST_PARTIES
from flower_graph.simulation import InProcessGrid
from flower_graph.storage.files import IN_PROCESS
from flower_graph.wire.keys import CONFIG, SERVER_ROUND

sys.path.insert(0, str(Path(__file__).parent / "frozen"))
from runs import COMPARED
from runs import METHODS as FROZEN

# (partition, round, message type) -> word; see Federation
Faults = Callable[[int, int, str], str]
Word = str | Callable[[RecordDict], None]
# What a server that lies sends in the place of messages; an honest one sends them as they are
Tells = Callable[["Federation", list[Message]], Iterable[Message]]
NAMES = {"nfedgnn": "nFedGNN", "fedscem": "FedSCem", "fedgls": "FedGLS", "ppfl": "PPFL-GNN"}


@dataclass(frozen=True)
class Setup:
    """A method with its settings on a small federation.

    ``final`` is the type of a round's last message. ``late`` rounds pass before a report tells
    of an exchange. ``atol`` is by how much figures differ where clients lie otherwise.
    """

    config: str
    overrides: tuple[str, ...]
    supernodes: int
    final: str = "train"
    late: int = 0
    atol: float = 1e-5

    @property
    def name(self) -> str:
        app = self.config.partition("/")[0]
        return NAMES.get(app, app)

    @property
    def fewest(self) -> int:
        """SuperNodes without which it is refused."""
        return FEWEST_PARTIES if self.load().strategy.distrusts else 1

    def with_(self, *overrides: str, **changes: Any) -> Setup:
        return replace(self, overrides=(*self.overrides, *overrides), **changes)

    def load(self, *overrides: str) -> RunConfig:
        return load_config(self.config, [*self.overrides, *overrides])

    def run(self, out: Path, *overrides: str, **how: Any) -> Done:
        how = {"supernodes": self.supernodes, "final": self.final, **how}
        return run(self.load(*overrides), out, **how)

    def whole(self, *overrides: str, **how: Any) -> Done:
        """Run it undisturbed, once a process: tests of what disturbs it share the run."""
        key = self, overrides, *sorted(how.items())
        if key not in _WHOLE:
            out = Path(tempfile.mkdtemp(dir=_FOLDER.name)) / "run"
            _WHOLE[key] = self.run(out, *overrides, **how)
        return _WHOLE[key]


_WHOLE: dict[Any, Done] = {}
_FOLDER = tempfile.TemporaryDirectory(prefix="whole-")
# Each client is answered with a model of its own
PERSONAL = ("fedgta", "fedpub")
# Each takes paths that another one takes, too: CI has FedProto (entries that stay at clients),
# FedGTA (a model for each client) and FedOpt (a server with a state)
ALIKE = ("fedavg", "fedprox", "local", "moon", "ditto", "fedpub", "scaffold")
FINAL = {"fedscem": "train.sum_unmask", "fedgls": "evaluate"}
FINAL |= dict.fromkeys((*PERSONAL, *COMPARED, "fedgcn"), "evaluate")
# One SuperNode for each client, and enough of them that a sum can do without one
FOUR = ("data.nodes=160", "partition.clients=4")
MORE: dict[str, tuple[int, tuple[str, ...]]] = {
    "nfedgnn": (5, ()),
    "lpgnn": (5, ()),
    "fedscem": (6, ("strategy.dropout=0.4",)),
    "deepwalk": (4, FOUR),
    "gat": (4, FOUR),
}
# All that are registered, PPFL-GNN with two models. A new method stands in tests/frozen/runs.py.
METHODS = {
    key: Setup(
        config,
        (*small, *MORE.get(key, (0, ()))[1]),
        MORE.get(key, (supernodes, ()))[0],
        FINAL.get(key, "train"),
        int(key == "fedscem"),
    )
    for key, (config, small, supernodes) in FROZEN.items()
}
PLAIN = "aggregation=plain alignment=plain"
SECURE, BASELINE = {"final": "train.sum_unmask"}, {"final": "evaluate", "late": 0}
# What of a method is a path of its own through the server or the client: keys of its strategy
VARIANTS = {
    name: METHODS[name.partition(",")[0]].with_(
        *(f"strategy.{one}" for one in words.split()), **how
    )
    for name, words, how in (
        ("nfedgnn, averaged", "share=averaged average_every=2", {}),
        ("nfedgnn, summed", "share=summed reg_weight=null", {"final": "train.add_up"}),
        ("fedscem, plain", PLAIN, {"final": "train"}),
        ("fedscem, aligned in the clear", "alignment=plain", {}),
        ("fedscem, secure, untrusted", "trust=malicious-server", {}),
        ("fedscem, minus", "variant=minus", {}),
        ("fedscem, batches", f"{PLAIN} batch_size=3 variant=iter", {"final": "train"}),
        ("fedscem, shared", "model_sharing=fedavg resolution=1e-6", {}),
        ("fedscem, self-training", "name=self-training", BASELINE),
        ("fedscem, fedavg", "name=fedavg", BASELINE),
        ("fedscem, local-sage", "name=local-sage", BASELINE),
        ("fedscem, fed-sage", "name=fed-sage", BASELINE),
        ("fedscem, median", "name=fedavg robust=median", BASELINE),
        ("fedgls, median", "robust=median", {}),
        ("fedgls, proto", "name=fedproto", {}),
        ("fedgls, alone", "name=local-gnn-knn", {}),
        ("fedgls, reset", "optimiser=reset", {}),
        ("deepwalk, alone", "name=local", {}),
        ("deepwalk, consensus", "alignment=consensus", {}),
        ("deepwalk, secure", "alignment=secure", SECURE),
    )
}
VARIANTS["deepwalk, secure, untrusted"] = VARIANTS["deepwalk, secure"].with_(
    *("partition.clients=6", "partition.private_share=0.08", "strategy.trust=malicious-server"),
    supernodes=6,
)
VARIANTS["fedproto, mixed"] = METHODS["fedproto"].with_("model.name=[gcn,sage,mlp]")
ALL = METHODS | VARIANTS


def tried(
    names: Iterable[str],
    fast: Collection[str] = ("nfedgnn",),
    slow: Collection[str] = METHODS.keys(),
) -> list[Any]:
    """Give a test's parameters: `make test` has one, CI all methods, a release all variants."""

    def suite(name: str) -> tuple[pytest.MarkDecorator, ...]:
        if name in fast:
            return ()
        return (pytest.mark.slow if name in slow and name not in ALIKE else pytest.mark.release,)

    return [pytest.param(name, marks=suite(name)) for name in names]


def one_fast(names: Collection[str], fast: str) -> list[Any]:
    """Give parameters of which `make test` has one, and CI all."""
    return tried(names, [fast], slow=names)


EVERY = tried(ALL, slow=[*METHODS, "fedscem, batches"])
EACH = tried(METHODS)
ONCE = tried(name for name in METHODS if name != "deepwalk")  # for what no model changes


def later(cases: Iterable[Any]) -> list[Any]:
    """Leave out LPGNN where something happens in later rounds: then it asks clients nothing."""
    return [one for one in cases if one.values[0] != "lpgnn"]


class Who(NamedTuple):
    """The clients of one round, as ``metrics.jsonl`` has them."""

    answered: set[int]
    failed: dict[int, str]
    left_out: dict[int, str]


def who_of(record: Mapping[str, Any]) -> Who:
    failed, left_out = (
        {one: part["reason"] for part in record[key] for one in numbers(part["clients"])}
        for key in ("failed", "left-out")
    )
    return Who(set(numbers(record["answered"])), failed, left_out)


@dataclass(frozen=True)
class Done:
    out: Path
    result: dict[str, Any]
    reports: list[RoundReport]
    grid: Federation

    @property
    def accuracies(self) -> list[float]:
        return [report.test_accuracy for report in self.reports]

    @property
    def figures(self) -> list[float]:
        """Whatever a fault would change: losses and accuracies of every round."""
        names = ("loss", "regulariser", "val_accuracy", "test_accuracy")
        return [getattr(report, name) for report in self.reports for name in names]

    @property
    def who(self) -> list[Who]:
        return [who_of(report.participation) for report in self.reports]

    @property
    def kept(self) -> dict[str, torch.Tensor]:
        files = sorted(self.out.glob("weights.safetensors"))
        kept = {name: value for file in files for name, value in load_file(file).items()}
        for file in self.out.parent.rglob(f"{self.out.name}*/**/{Embeddings.FILE}"):
            if (rows := Embeddings.read(file.parent)) is not None:
                kept |= {
                    f"z-{c}": torch.as_tensor(rows.of_client(c).embeddings) for c in {*rows.client}
                }
        return kept


def assert_close(one: Done, other: Done, rtol: float, atol: float) -> None:
    """Hold figures, who took part, and what is left against the other run's."""
    np.testing.assert_allclose(one.figures, other.figures, rtol=rtol, atol=atol)
    assert [who.answered for who in one.who] == [who.answered for who in other.who]
    left, right = one.kept, other.kept
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_allclose(value, right[name], rtol=10 * rtol, atol=10 * atol)


def run(
    config: RunConfig,
    out: Path,
    *,
    supernodes: int,
    resume: bool = False,
    stop_at: int = 0,
    **of_grid: Any,
) -> Done:
    """Run a config in this process, every output included.

    After round ``stop_at`` somebody presses Ctrl-C. Other parameters are the grid's.
    """
    where = {"state_dir": out.with_name(f"{out.name}-state"), **of_grid}
    grid = Federation(client_app(config, out), num_supernodes=supernodes, **where)

    def stop(report: RoundReport) -> None:
        if report.round == stop_at:
            raise KeyboardInterrupt

    result: dict[str, Any] = {}
    try:
        result = run_server(config, grid, out, engine="in-process", resume=resume, on_round=stop)
    except KeyboardInterrupt:
        assert stop_at
    return Done(out, result, read_reports(out / "metrics.jsonl"), grid)


def good(partition: int, server_round: int, message_type: str) -> str:
    return "good"


def honest(grid: Federation, sent: list[Message]) -> list[Message]:
    return sent


def at(word: str, rounds: Container[int] | None = None, kind: str = "") -> Faults:
    """Let the second client's messages go wrong: in some rounds or all, of one type or all."""

    def fault(partition: int, server_round: int, message_type: str) -> str:
        is_due = rounds is None or server_round in rounds
        return word if partition == 1 and is_due and kind in ("", message_type) else "good"

    return fault


class Federation(InProcessGrid):
    """Does to each message what a word for (partition, round, message type) says: clients go wrong.

    ``tells`` gives what is delivered in the place of some messages: the server lies. It may change
    them, or add some, whose replies the server does not get.

    ``silent``: it never reaches the client. ``error``: the client fails. ``lost``: the client does
    its work and the reply never arrives. ``late``: the reply comes in the next exchange. ``empty``:
    the reply has no records. ``killed``: the client works in a process of its own, which the kernel
    ends after ``kill_after`` seconds. ``gone``: the SuperNode is not connected (message type
    ``connect``). A function in a word's place changes the reply.

    ``restarts`` says which partitions are started anew once a round is done, that is once its
    message of type ``final`` was sent: memory and context are gone, and with ``new_id`` they get
    another id, as SuperNodes without authentication do. Without a ``state_dir`` nothing lasts.
    """

    def __init__(
        self,
        app: Any,
        *,
        num_supernodes: int,
        state_dir: Path | str | None = None,
        faults: Faults = good,
        tells: Tells = honest,
        kill_after: Iterable[float] = (),
        restarts: Mapping[int, Iterable[int]] | None = None,
        final: str = "train",
        new_id: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(app, num_supernodes=num_supernodes, **more)
        # As in a deployment: what a client keeps is in its context and in files, not in memory.
        for context in self.contexts.values():
            if context.node_config["state-dir"] == IN_PROCESS:
                context.node_config["state-dir"] = "" if state_dir is None else str(state_dir)
        self.faults, self.tells, self.final, self.new_id = faults, tells, final, new_id
        self.killed = self.restarted = self.done = 0
        self.kinds: set[str] = set()  # types of messages that were sent
        self.exchanged: list[tuple[Message, Message]] = []  # what clients were sent and answered
        self._again: list[Message] = []
        self._kill_after = iter(kill_after)
        self._restarts = {done: list(nodes) for done, nodes in (restarts or {}).items()}
        self._late: dict[str, Message] = {}
        self._round, self._is_trained = 0, False

    def word(self, node_id: int, server_round: int, message_type: str) -> str:
        partition = int(self.contexts[node_id].node_config["partition-id"])
        return self.faults(partition, server_round, message_type)

    def get_node_ids(self) -> list[int]:
        for partition in self._restarts.pop(self.done, []):
            self._restart(partition)
        connected = super().get_node_ids()
        return [n for n in connected if self.word(n, self._round + 1, "connect") != "gone"]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self._replies.update(self._late)
        self._late, ids, kind = {}, [], ""
        sent = list(messages)
        for message in self.tells(self, sent):
            kind = message.metadata.message_type
            server_round = round_of(message)
            self._round = max(self._round, server_round)
            number = self._deliver(message, self.word_of(message, server_round))
            ids += [number] if any(message is one for one in sent) else []
        self.kinds.add(kind)
        self._is_trained |= kind == "train"
        if kind == self.final and self._is_trained:
            self.done, self._is_trained = self.done + 1, False
        return [one for one in ids if one]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        if replies:
            replies, self._again = replies + self._again, []
        return replies

    def _handle(self, message: Message, context: Context) -> Message:
        reply = super()._handle(message, context)
        self.exchanged.append((message, reply))
        return reply

    def word_of(self, message: Message, server_round: int) -> Word:
        meta = message.metadata
        if meta.dst_node_id not in self.contexts:
            return "unknown"
        return self.word(meta.dst_node_id, server_round, meta.message_type)

    def _deliver(self, message: Message, word: Word) -> str:
        """Deliver one message; return its number, empty where nobody has this id."""
        if word in ("silent", "killed"):
            number = self._number(message)
            if word == "killed":
                self._die(message)
            return number
        if word == "error":
            return self._fail(message)
        numbers = super().push_messages([message])
        if not numbers:
            return ""
        if word in ("lost", "late"):
            reply = self._replies.pop(numbers[0])
            if word == "late":
                self._late[numbers[0]] = reply
        if word == "empty" and self._replies[numbers[0]].has_content():
            self._replies[numbers[0]].content = RecordDict()
        if callable(word):
            word(self._replies[numbers[0]].content)
        return numbers[0]

    def _fail(self, message: Message) -> str:
        def broken(*_: Any) -> Message:
            raise OSError("the disk is full")

        app, self.client_app = self.client_app, broken  # type: ignore[assignment]
        try:
            return super().push_messages([message])[0]
        finally:
            self.client_app = app

    def _die(self, message: Message) -> None:
        """Have the client work in a process that is killed; it keeps nothing but its files."""
        for context in self.contexts.values():
            vars(context).pop("live", None)
        process = os.fork()
        if process == 0:  # the client
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, next(self._kill_after))
                super().push_messages([message])
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        next(self._kill_after)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status)
        self.killed += 1

    def _restart(self, partition: int) -> None:
        old = next(c for c in self.contexts.values() if c.node_config["partition-id"] == partition)
        del self.contexts[old.node_id]
        number = secrets.randbits(63) if self.new_id else old.node_id
        self.contexts[number] = Context(
            old.run_id, number, old.node_config, RecordDict(), old.run_config
        )
        self.restarted += 1


def round_of(message: Message) -> int:
    """Read a message's round: its group, or where Flower's ``FedAvg`` writes it."""
    config = message.content.config_records.get(CONFIG, {})
    return int(message.metadata.group_id or config.get(SERVER_ROUND, 0))  # type: ignore[arg-type]


Trained = tuple[dict[str, Any], list[float]]  # what the server holds, and what clients measured


def run_rounds(config: RunConfig, supernodes: int) -> Trained:
    """Do a run in this process and without files, in which nobody is left out."""
    grid = InProcessGrid(client_app(config, None), num_supernodes=supernodes)
    reports = list[RoundReport]()
    strategy: Any = method_of(config).build_strategy(config, None)
    strategy.start(grid, num_rounds=config.rounds, on_round=reports.append)
    assert [report.rejected for report in reports] == [[]] * config.rounds
    figures = [one for r in reports for one in (r.loss, r.val_accuracy, r.test_accuracy)]
    return strategy.weights(), figures
