"""SecureAverage beside plain averaging and Flower's SecAgg+: two rounds of each, in one process.

python -m benchmarks.averages [--quick]
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as OldFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp.strategy import FedAvg

from benchmarks.measure import duration, say, table
from flower_graph.records.rounds import format_bytes
from flower_graph.secure.parties.registry import Registry, new_identity
from flower_graph.secure.sum.partners import plan
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.secure_average import SecureAverage, secure_average_mod
from flower_graph.wire.ledger import count_bytes

LENGTH, QUICK_LENGTH = 100_000, 1_000
SIZES, QUICK_SIZES = (10, 100, 1_000), (10,)
WEIGHT = 10
OLD = "Flower's SecAgg+"
MOST_OLD = 100  # clients of SecAgg+: its server takes a minute there, and time grows as their cube
SHARES = 0.3, 0.1  # of clients that may vanish, and that may collude, as `SumServer` has them


class MeasuredGrid(InProcessGrid):
    """Adds up the time of the clients, and the bytes of all messages both ways."""

    seconds, bytes = 0.0, 0

    def push_messages(self, messages: Any) -> list[str]:
        messages = list(messages)
        started = time.perf_counter()
        ids = super().push_messages(messages)
        self.seconds += time.perf_counter() - started
        contents = [*messages, *(self._replies[one] for one in ids)]
        self.bytes += sum(count_bytes(one.content) for one in contents if one.has_content())
        return ids


def draw_vector(partition: int, length: int) -> Any:
    """Draw a client's numbers."""
    return np.random.default_rng(partition).normal(size=length).astype(np.float32)


def app_of(length: int, mods: list[Any]) -> ClientApp:
    """Make an app whose clients answer with their numbers."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = ArrayRecord(
            {"w": Array(draw_vector(int(context.node_config["partition-id"]), length))}
        )
        metrics = MetricRecord({"num-examples": WEIGHT})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


class OldClient(NumPyClient):
    """The same client for Flower's older interface, the only one that SecAgg+ has."""

    def __init__(self, vector: Any) -> None:
        self.vector = vector

    def fit(self, parameters: Any, config: Any) -> Any:
        return [self.vector], WEIGHT, {}


def old_client(context: Context) -> Client:
    """Make a client for SecAgg+."""
    length = int(context.run_config["length"])
    return OldClient(draw_vector(int(context.node_config["partition-id"]), length)).to_client()


def new_api(grid: MeasuredGrid, strategy: Any, length: int) -> Any:
    """Run a strategy of Flower's present interface; return the mean."""
    first = ArrayRecord({"w": Array(np.zeros(length, np.float32))})
    return strategy.start(grid, first, num_rounds=1).arrays["w"].numpy()


def old_api(grid: MeasuredGrid, length: int) -> Any:
    """Run SecAgg+ with as many shares and the threshold of our own sums; return the mean."""
    clients = len(grid.contexts)
    partners, threshold, _ = plan(clients, *SHARES)
    first = ndarrays_to_parameters([np.zeros(length, np.float32)])
    found = []

    def keep(server_round: int, arrays: Any, config: Any) -> None:
        found.append(arrays[0])

    strategy = OldFedAvg(
        min_fit_clients=clients,
        min_available_clients=clients,
        fraction_evaluate=0,
        initial_parameters=first,
        evaluate_fn=keep,
    )
    context = Context(grid.run.run_id, 0, {}, RecordDict(), {})
    legacy = LegacyContext(context, ServerConfig(num_rounds=1), strategy)
    DefaultWorkflow(SecAggPlusWorkflow(partners + 1, threshold))(grid, legacy)
    return found[-1]


def measure(clients: int, length: int, folder: Path) -> list[list[str]]:
    """Run all forms with the same clients; return a row for each."""
    registry, configs = Registry({}, 1), []
    for client in range(clients):
        key = new_identity(folder / f"key-{client}")
        registry = registry.with_party(key, [range(client, client + 1)])
        about = {"identity-key": str(folder / f"key-{client}")}
        configs.append({**about, "registry": str(folder / "registry.json")})
    registry.write(folder / "registry.json")
    plain, masked = app_of(length, []), app_of(length, [secure_average_mod])
    server = folder / "registry.json"
    quiet = {"fraction_evaluate": 0.0}
    forms: dict[str, tuple[ClientApp, Any, Callable[[MeasuredGrid], Any]]] = {
        "plain": (plain, None, lambda grid: new_api(grid, FedAvg(**quiet), length)),
        "SecureAverage": (
            masked,
            None,
            lambda grid: new_api(grid, SecureAverage(FedAvg(**quiet)), length),
        ),
        "SecureAverage, server may lie": (
            masked,
            configs,
            lambda grid: new_api(grid, SecureAverage(FedAvg(**quiet), registry=server), length),
        ),
        OLD: (
            ClientApp(client_fn=old_client, mods=[secaggplus_mod]),
            None,
            lambda grid: old_api(grid, length),
        ),
    }
    expected = np.mean([draw_vector(client, length) for client in range(clients)], 0)
    rows = []
    for name, (app, node_config, start) in forms.items():
        if name == OLD and clients > MOST_OLD:
            continue
        grid = MeasuredGrid(
            app, num_supernodes=clients, node_config=node_config, run_config={"length": length}
        )
        started = time.perf_counter()
        mean = start(grid)
        whole = time.perf_counter() - started
        if grid.tracebacks:
            raise RuntimeError(next(iter(grid.tracebacks.values())))
        error = float(np.abs(mean - expected).max())
        each = grid.seconds / clients
        times = duration(each), duration(whole - grid.seconds)
        traffic = format_bytes(grid.bytes // clients)
        rows.append([f"{clients:,}", name, *times, traffic, f"{error:.0e}"])
        say(" | ".join(rows[-1]))
    return rows


def main(arguments: list[str]) -> None:
    """Measure all sizes and print the table as JSON."""
    quick, rows = "--quick" in arguments, list[list[str]]()
    length = QUICK_LENGTH if quick else LENGTH
    for clients in QUICK_SIZES if quick else SIZES:
        with TemporaryDirectory() as folder:
            rows += measure(clients, length, Path(folder))
    about = f"""FedAvg of {length:,} numbers, one round with enrolment.
        SecAgg+ has the partners and the threshold of our sums, and Flower's older interface.
        *Error* is the largest difference
        from the mean in double precision."""
    head = ["clients", "sum", "a client", "server", "bytes of a client", "error"]
    print(json.dumps([table("A secure average", about, head, rows)]))


if __name__ == "__main__":
    main(sys.argv[1:])
