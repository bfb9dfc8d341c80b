"""A Flower grid in one process: the same strategies and clients, without Ray and polling.

``InProcessGrid`` calls the ``ClientApp`` as soon as a message is pushed, and keeps the reply until
it is pulled. An exchange takes microseconds instead of a tenth of a second. Tests, notebooks,
sweeps and the papers' tables run on it. It behaves as Flower's engines do: each client gets its own
copy of the records, an exception becomes an error reply and undoes changes to the client's state,
and messages to unknown nodes are not sent. Clients run one after another, and a deadline cannot
interrupt a client.
"""

import copy
import hashlib
import itertools
import logging
import secrets
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict, UserConfigValue
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flower_graph.engine.machine import keep_freed_memory
from flower_graph.flower_compat import ErrorCode, Run, identify, stamp
from flower_graph.storage.files import IN_PROCESS, STATE_DIR
from flower_graph.wire.arrays import own_records

LOG = logging.getLogger(__name__)
NodeConfig = Mapping[str, UserConfigValue]


class InProcessGrid(Grid):
    """Runs a ``ClientApp`` for a number of virtual SuperNodes in this process.

    Outside a Flower run, ``Message(...)`` fails until the process has a ``TaskIdentity``. The
    constructor sets the parts that are missing.

    Parameters
    ----------
    client_app : ClientApp
        The app of every node.
    num_supernodes : int
        Number of nodes, at least 1.
    run_config : Mapping or None
        ``context.run_config`` of every node.
    run_id : int or None
        Flower's number of the run. The default is a new number, so that two grids in one process
        never share their clients' state.
    node_config : Mapping, sequence of Mapping, or None
        Entries of ``context.node_config`` besides ``partition-id``, ``num-partitions`` and
        ``state-dir`` (``":memory:"``), which it may replace: the same at all nodes, or each one's.
    seed : int
        Node ids are drawn from the seed and the partition id.

    Attributes
    ----------
    contexts : dict[int, Context]
        The context of each node, with its state, by node id.
    tracebacks : dict[int, str]
        The last error of each node that failed, by node id.

    Raises
    ------
    ValueError
        If `num_supernodes` is less than 1, or `node_config` has another length.
    """

    def __init__(
        self,
        client_app: ClientApp,
        *,
        num_supernodes: int,
        run_config: Mapping[str, UserConfigValue] | None = None,
        run_id: int | None = None,
        node_config: NodeConfig | Sequence[NodeConfig] | None = None,
        seed: int = 0,
    ) -> None:
        if num_supernodes < 1:
            raise ValueError(f"num_supernodes is {num_supernodes}, must be at least 1")
        if isinstance(node_config, Mapping | None):
            node_config = [node_config or {}] * num_supernodes
        if len(node_config) != num_supernodes:
            raise ValueError(f"node_config: {len(node_config)} for {num_supernodes} nodes")
        keep_freed_memory()  # the clients of all rounds share this process
        self.client_app = client_app
        run_id = secrets.randbits(62) if run_id is None else run_id
        identify(run_id)
        self._run = Run.create_empty(run_id)
        self._replies: dict[str, Message] = {}
        self._numbers = itertools.count(1)
        self.contexts: dict[int, Context] = {}
        self.tracebacks: dict[int, str] = {}
        for partition, own in enumerate(node_config):
            # 64 bits, so that nobody takes it for the partition id
            digest = hashlib.blake2b(f"{seed}:{partition}".encode(), digest_size=8).digest()
            node_id = int.from_bytes(digest, "big")
            local: dict[str, UserConfigValue] = {
                "partition-id": partition,
                "num-partitions": num_supernodes,
                STATE_DIR: IN_PROCESS,
                **own,
            }
            given = run_id, node_id, local, RecordDict(), dict(run_config or {})
            self.contexts[node_id] = Context(*given)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return Run(**vars(self._run))

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """As Flower's (deprecated) method of this name."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Run the client app on each message, one after another, and keep the replies.

        Returns the messages' ids, as on Ray without those to unknown nodes. A client's exception
        becomes an error reply, except KeyboardInterrupt and SystemExit.
        """
        message_ids = []
        for message in messages:
            context = self.contexts.get(message.metadata.dst_node_id)
            if context is None:
                LOG.debug("no node %d in this grid", message.metadata.dst_node_id)
                continue
            message_id = self._number(message)
            reply = self._handle(message, context)
            self._number(reply)
            self._replies[message_id] = reply
            message_ids.append(message_id)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        result = (self._replies.pop(message_id, None) for message_id in message_ids)
        return [reply for reply in result if reply is not None]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push and pull. `timeout` has no effect: replies are there at once."""
        return self.pull_messages(self.push_messages(messages))

    def _number(self, message: Message) -> str:
        message_id = f"{self._run.run_id}-{next(self._numbers)}"
        stamp(message, run_id=self._run.run_id, message_id=message_id)
        return message_id

    def _handle(self, message: Message, context: Context) -> Message:
        received = copy.copy(message)
        received.content = own_records(message.content)
        state = own_records(context.state)
        try:
            reply = self.client_app(received, context)
            if not isinstance(reply, Message):
                raise TypeError(f"ClientApp returned {type(reply).__name__}, not a Message")
            return reply
        except Exception as error:
            context.state = state  # Flower's engines keep the old context too
            LOG.debug("ClientApp failed on node %d", context.node_id, exc_info=True)
            self.tracebacks[context.node_id] = "".join(traceback.format_exception(error))
            last = traceback.extract_tb(error.__traceback__)[-1]  # the line that raised it
            words = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, words), reply_to=message)
