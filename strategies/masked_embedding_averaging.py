"""FedSCem: node classification over ego-networks by averaging embeddings that nobody sees.

Xie, Xiong and Yang, "Federated Node Classification over Distributed Ego-Networks with Secure
Contrastive Embedding Sharing", CIKM 2024. Every client holds an ego-network, its own GNN and
classifier, and a projection head ``f``. Ego-networks overlap: what one client lacks of a node's
neighbourhood, another has.

Once, before the first round:

1. clients make keys, and the server hands the public ones on;
2. *secure alignment* (section 4.3.1): all clients come to one order of the nodes that at least
   two of them hold, the *slots*; the server learns neither nodes nor holders.

Round ``t``, in two exchanges. The first brings the sums of round ``t - 1``:

3. client: takes the sums' pads off, ``h~_v = sum / count`` (equation 7), for its own slots;
4. client: *contrastive fusion*, a step on ``L_nc + mu L_ct``, NT-Xent between ``f(h)`` and
   ``f(h~)`` (equations 8 to 11);
5. client: a step on ``L_nc`` (equation 3), then ``H = GNN(X, A)`` (equation 1);
6. client -> server: embeddings by slot and a one for each slot that it holds, under pads and masks
   (*secure aggregation*, section 4.3.2); what it measured after step 4, too;
7. server: adds up, and in the second exchange takes the masks away; clients prepare the keys of
   round ``t + 1`` in the same message.

After the last round one more pass does steps 3, 4 and 6, the latter for measurements alone.

*Variants.* ``full`` is FedSCem. ``minus`` (FedSCem−) has no step 5. ``iter`` (FedSCem_iter) steps
on ``mu L_ct`` alone in step 4, so that the two losses alternate. *Model sharing*: with ``fedavg``
or ``fedprox`` the clients' weights are added up as well, and every round begins with their mean.

*Absent clients* keep their weights. A round in which too few clients answer is skipped: nothing of
it is revealed, and step 4 goes on without ``L_ct``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from flower_graph.client_noise import ClientNoise
from flower_graph.data.ego_networks import EgoNetwork
from flower_graph.ego_book import EgoBook
from flower_graph.ego_cohort import EgoSettings
from flower_graph.ego_host import EgoHost
from flower_graph.ego_roll import ego_roll
from flower_graph.ego_session import EgoSession
from flower_graph.errors import NoClientsError
from flower_graph.records.ego import EgoHello, EgoReply, EgoRequest
from flower_graph.records.keys import ARRAY_NAMES, CONFIG, HANDLED, NOT_SAVED, SUMS, TOTAL
from flower_graph.relay import resolve_device
from flower_graph.reply_limits import reply_bytes
from flower_graph.report import RoundReport, format_round
from flower_graph.without_evaluate import WithoutEvaluate

LOG = logging.getLogger(__name__)
ACTIONS = ("align", "union", "unmask", "save", "finish")  # named actions, for make_client_app
VARIANTS = ("full", "iter", "minus")
MODEL_SHARING = ("none", "fedavg", "fedprox")
FINE = 2.0**-20  # step of fixed-point weights: in a round they change by less than embeddings do

Answer = tuple[list[Any], int, dict[str, Any]]


# Client ------------------------------------------------------------------------------------------


class EgoNetworkClient(NumPyClient):
    """The ego-networks that one SuperNode hosts: in a deployment one, in a simulation many.

    Parameters
    ----------
    context : Context
        The ClientApp's context; weights and secrets live behind it.
    egos : sequence of EgoNetwork
        The clients' graphs, with node identities that mean the same at all clients.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    checkpoint_dir : Path, optional
        Where to save the clients' weights when the server asks for a checkpoint.
    noise : ClientNoise, optional
        What is added to each client's embeddings before masks and pads.
    """

    def __init__(
        self,
        context: Context,
        egos: Sequence[EgoNetwork],
        *,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
        noise: ClientNoise | None = None,
    ) -> None:
        self.host = EgoHost(
            context,
            egos,
            device=resolve_device(device),
            checkpoint_dir=checkpoint_dir,
            noise=noise,
        )

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Make keys (step 1)."""
        hello = EgoHello.from_config(config)
        reply = self.host.hello(hello)
        return reply.to_config() | {HANDLED: self.host.handled(hello.settings)}

    def align(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Answer one stage of the alignment (step 2)."""
        return [], 1, self.host.align(config)

    def union(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Add the clients' table of names to a masked sum (step 2)."""
        reply = self.host.unite(config)
        return [reply.total], 1, reply.to_config() | {ARRAY_NAMES: [f"{SUMS}/{TOTAL}"]}

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Fuse, train, embed and send the masked vector (steps 3 to 6)."""
        return self.host.round(EgoRequest.from_numpy(parameters, config)).to_numpy()

    def unmask(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Reveal shares, prepare the next round (step 7)."""
        return [], 1, self.host.unmask(config)

    def save(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Write a checkpoint, in a round that the clients take no part in."""
        why = self.host.save(config)
        return [], 1, {NOT_SAVED: why} if why else {}

    def finish(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Forget the run."""
        self.host.drop()
        return [], 1, {}


# Server ------------------------------------------------------------------------------------------


class MaskedEmbeddingAveraging(WithoutEvaluate):
    """Server of FedSCem, for clients that answer as ``EgoNetworkClient`` does.

    Parameters
    ----------
    settings : EgoSettings
        The clients' models and training.
    variant : str
        ``"full"``, ``"iter"`` or ``"minus"``.
    model_sharing : str
        ``"none"``, ``"fedavg"`` or ``"fedprox"`` (with ``settings.proximal``).
    alignment : str
        ``"psi"``: blinded identities. ``"polynomial"``: the paper's, for reproduction only.
        ``"plain"``: in the clear.
    aggregation : str
        ``"masked"`` or ``"plain"``.
    participation : float
        Share of the clients asked each round, above 0 and at most 1.
    limit, resolution : float
        Largest size of a number in an embedding, and step of the fixed-point numbers; where models
        are shared, a step of 2^-20 at most.
    dropout : float
        Share of a round's clients that may vanish.
    min_nodes : int
        SuperNodes to wait for before a round.
    checkpoint_dir, checkpoint_every : Path, int
        Where and every how many rounds to save everything; 0 for never.

    Notes
    -----
    A client must answer ``query`` with its keys, ``train.align`` and ``train.union`` with its part
    of the alignment, ``train`` with the vector, ``train.unmask`` with shares and keys,
    ``train.save`` and ``train.finish`` with nothing (``flower_graph.records``).
    """

    def __init__(
        self,
        settings: EgoSettings,
        *,
        variant: str = "full",
        model_sharing: str = "none",
        alignment: str = "psi",
        aggregation: str = "masked",
        participation: float = 1.0,
        limit: float = 32.0,
        resolution: float = 2.0**-12,
        dropout: float = 0.3,
        min_nodes: int = 1,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        for name, value, allowed in (
            ("variant", variant, VARIANTS),
            ("model_sharing", model_sharing, MODEL_SHARING),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}, must be one of {', '.join(allowed)}")
        if not settings.tau > 0:
            raise ValueError(f"tau is {settings.tau}, must be above 0")
        self.session = EgoSession(
            settings,
            alignment=alignment,
            aggregation=aggregation,
            participation=participation,
            limit=limit,
            resolution=resolution if model_sharing == "none" else min(resolution, FINE),
            dropout=dropout,
            min_nodes=min_nodes,
        )
        self.book = EgoBook(
            settings,
            variant=variant,
            shares_model=model_sharing != "none",
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
        )

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Payload bytes so far: direction to kind to bytes."""
        return self.book.ledger.payload

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 400,
        timeout: float = 600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        on_round: Callable[[RoundReport], None] | None = None,
        resume: bool = False,
    ) -> Result:
        """Run the method.

        Parameters
        ----------
        grid : Grid
            Flower's grid, or ``flower_graph.simulation.InProcessGrid``.
        initial_arrays, train_config, evaluate_config, evaluate_fn : optional
            Refused: there is no global model, and the clients measure in ``train``.
        num_rounds : int
            Rounds to run, those before a checkpoint included.
        timeout : float
            Seconds that an exchange may take.
        on_round : callable, optional
            Called with every round's report; without it, one line is logged.
        resume : bool
            Go on from the last complete checkpoint in ``checkpoint_dir``.

        Returns
        -------
        Result
            The metrics of every round; with model sharing, the mean model's arrays.

        Raises
        ------
        NoClientsError
            If no client is there, or none gives a usable answer before the deadline.
        AlignmentError
            If the clients cannot be brought to one order of slots.
        CheckpointError
            If there is nothing to resume from, or what there is does not fit.
        """
        if num_rounds < 1:
            raise ValueError(f"num_rounds: {num_rounds} is not at least 1")
        given = (initial_arrays, train_config, evaluate_config, evaluate_fn)
        if any(value is not None for value in given):
            raise ValueError(
                "initial_arrays, train_config, evaluate_config, evaluate_fn: there is no global "
                "model to start from or to evaluate; leave them out"
            )
        if self.session.is_open:
            raise ValueError("this strategy has run already: build a new one")
        self.session.open(grid, timeout, num_rounds)
        self.session.resume = self.book.checkpoints.resume
        first = self.book.resume(self.session) + 1 if resume else 1
        result = Result()
        early: list[dict[str, Any]] = []  # left out before there was anything to report
        for server_round in range(first, num_rounds + 2):
            report, answers = self._round(server_round)
            # A round's measurements come with the next round's vectors.
            if server_round == first:
                early = report.rejected
            else:
                report.rejected[:0], early = _others(early, report.rejected), []
                result.train_metrics_clientapp[report.round] = _as_metrics(report)
                (on_round or self._log)(report)
                self.book.save(report.round, self.session, answers)
        self._finish(num_rounds)
        result.arrays = self._arrays()
        return result

    def _round(self, server_round: int) -> tuple[RoundReport, Mapping[int, EgoReply]]:
        """Do steps 3 to 7; return the report of the round before, and the answers."""
        started = time.perf_counter()
        if self.session.admit(server_round):
            self.book.forget_sums()
        if self.session.is_masked and not self.session.is_prepared():
            self.session.prepare(server_round, self.session.sample(server_round))
        base = self.book.request(server_round, self.session)
        layout = self.book.layout(server_round, self.session)
        requests = self.session.requests(server_round, base, layout.length)
        vectors, rejected = self.session.ask(server_round, requests, layout.length)
        if requests and not vectors:  # without requests the round is skipped
            raise NoClientsError(
                f"round {server_round}: none of {len(requests)} SuperNodes gave a usable answer "
                f"within {self.session.timeout:g} s; the log names the reasons"
            )
        found = self.session.close(server_round, vectors)
        rejected, self.session.refused = [*self.session.refused, *rejected], []
        found.rejected += [{"node": r.node_id, "reason": r.reason} for r in rejected]
        asked = sum(request.clients.size for request in requests.values())
        report = self.book.take(layout, found, base.ring, vectors.values(), asked)
        report.round = server_round - 1
        report.participation = ego_roll(self.session, requests, found, rejected).to_record()
        report.wire_bytes = self.session.exchange.ledger.wire
        report.seconds = time.perf_counter() - started
        return report, vectors

    def _finish(self, server_round: int) -> None:
        """Let the clients forget the run."""
        nodes = [n for n in self.session.exchange.grid.get_node_ids() if n in self.session.clients]
        self.session.exchange.send(
            dict.fromkeys(nodes, RecordDict({CONFIG: ConfigRecord({})})),
            message_type="train.finish",
            server_round=server_round,
            timeout=self.session.timeout,
            read=lambda node, content: None,
            max_reply_bytes=reply_bytes(),
        )

    # Flower's own round loop has no place for two exchanges a round: ``start`` is ours.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: a round is two exchanges."""
        raise RuntimeError("a round is two exchanges: call start, not Flower's round loop")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse: a round is two exchanges."""
        raise RuntimeError("a round is two exchanges: call start, not Flower's round loop")

    def summary(self) -> None:
        """Log the settings in one line."""
        LOG.info("MaskedEmbeddingAveraging: %s, %s", self.book.variant, self.book.settings)

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord({name: Array(value) for name, value in self.weights().items()})

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Return the mean model, where models are shared; else the server has nothing."""
        return self.book.model_arrays()

    def _log(self, report: RoundReport) -> None:
        LOG.info(format_round(report, self.session.rounds))


def _others(early: list[dict[str, Any]], later: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries about whom no later one names."""
    known = [(entry.get("node"), entry.get("client")) for entry in later]
    return [entry for entry in early if (entry.get("node"), entry.get("client")) not in known]


def _as_metrics(report: RoundReport) -> MetricRecord:
    names = ("loss", "train_accuracy", "val_accuracy", "test_accuracy", "answered")
    return MetricRecord({name.replace("_", "-"): getattr(report, name) for name in names})
