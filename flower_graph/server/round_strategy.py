"""`RoundStrategy`, the base of servers with rounds of their own.

Methods that average use the loop (``round_loop.py``) with Flower's verbs (``averaging.py``). Other
methods write

- ``ask``, ``read`` and ``learn``: a round's requests, the check of a reply, and the use of the
  replies; or `round`, if a round is more than one exchange;
- `weights`: the server's model;
- `fixed_settings`, `state` and `load_state`: the content of a checkpoint;
- a `Membership`: the question to newcomers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from flower_graph.records.participation import Participation
from flower_graph.records.rounds import BestRound, RoundReport
from flower_graph.server.round_loop import RoundLoop
from flower_graph.server.session import Session, unsaved
from flower_graph.wire.exchange import Replies
from flower_graph.wire.keys import CONFIG

LOG = logging.getLogger(__name__)


class Request(Protocol):
    """A round's request to a SuperNode."""

    @property
    def clients(self) -> object:
        """The numbers of the clients asked: a list or an array."""

    def to_record(self) -> RecordDict: ...


class Answer(Protocol):
    """A SuperNode's reply, after it is read."""

    @property
    def not_saved(self) -> str:
        """Why the clients have not completed a checkpoint; "" if they have or need not."""


Q = TypeVar("Q", bound=Request)
A = TypeVar("A", bound=Answer)


class RoundStrategy(RoundLoop, Generic[Q, A]):
    """A server with rounds of its own, in which clients or the server measure during ``train``."""

    def __init__(self, session: Session) -> None:
        self.session, self.best = session, BestRound()
        self.requests: dict[int, Q] = {}  # of the current round, by SuperNode
        self.answers: dict[int, A] = {}  # their replies
        self.entries: dict[int, Mapping[str, Any]] = {}  # sent with the requests

    # What a method writes; requests and replies are messages of its own

    def ask(self, server_round: int) -> Mapping[int, Q]:
        raise NotImplementedError

    def read(self, node: int, content: RecordDict) -> A:
        raise NotImplementedError

    def reply_bytes(self) -> int:
        """Return the largest allowed reply, in bytes."""
        raise NotImplementedError

    def learn(self, server_round: int, replies: Replies[A]) -> RoundReport:
        raise NotImplementedError

    def round(self, server_round: int) -> RoundReport | None:
        self.requests = dict(self.ask(server_round))
        replies = self.send(server_round, "train", self._config)
        self.answers = replies.values
        return self.learn(server_round, replies)

    def send(
        self, server_round: int, message_type: str, config: Mapping[str, Any] = MappingProxyType({})
    ) -> Replies[A]:
        contents = {node: request.to_record() for node, request in self.requests.items()}
        for node, content in contents.items() if config or self.entries else ():
            # The method's own entries win over the caller's
            own = {**content.config_records[CONFIG], **self.entries.get(node, {})}
            content[CONFIG] = ConfigRecord({**config, **own})
        self.session.asked = {
            node: np.asarray(one.clients, np.int64) for node, one in self.requests.items()
        }
        return self.session.send(
            contents,
            server_round,
            self.read,
            message_type=message_type,
            max_reply_bytes=self.reply_bytes(),
        )

    def clients_save(self, server_round: int) -> dict[int, str]:
        """Have the clients complete a checkpoint; return the SuperNodes that have not, and why."""
        # The round's requests have already asked them to save.
        return unsaved(self.requests, {n: one.not_saved for n, one in self.answers.items()})

    def report(
        self,
        server_round: int,
        who: Participation,
        accuracy: Mapping[str, float],
        **figures: object,
    ) -> RoundReport:
        """Return a round's report: accuracy by role, ``figures``, and the session's figures."""
        return self.session.report(
            server_round,
            who,
            asked=sum(map(len, self.session.asked.values())),
            answered=len(who.answered),
            train_accuracy=accuracy["train"],
            val_accuracy=accuracy["val"],
            test_accuracy=accuracy["test"],
            **figures,
        )

    def check_start(self, given: Collection[str], *, resume: bool) -> None:
        if self.session.is_open:
            raise ValueError("this strategy has run already: build a new one")
        if given:
            raise ValueError(f"{', '.join(given)}: the server has no such model; leave it out")

    def summary(self) -> None:
        LOG.info("%s: %s", type(self).__name__, self.fixed_settings())

    def configure_train(self, *_: object, **__: object) -> NoReturn:
        """Refuse Flower's own round loop: rounds of this kind are not its two exchanges."""
        raise RuntimeError("call start, not Flower's round loop")

    aggregate_train = configure_evaluate = aggregate_evaluate = configure_train
