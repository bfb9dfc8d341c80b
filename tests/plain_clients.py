"""Clients as `docs/reference/messages.md` describes them: one for each strategy, Flower alone.

Nothing of the library is used: what it would do for a client is written out.
"""

import hashlib
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


def integers(values: Any) -> bytes:
    return np.asarray(values, "<i8").tobytes()


def read(data: Any) -> np.ndarray:
    return np.frombuffer(data, "<i8")


def record(arrays: dict[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.ascontiguousarray(v)) for name, v in arrays.items()})


def reply(message: Message, **records: dict[str, Any]) -> Message:
    kinds: dict[str, Any] = {"config": ConfigRecord, "metrics": MetricRecord}
    content = {name: kinds.get(name, record)(values) for name, values in records.items()}
    return Message(RecordDict(content), reply_to=message)


def here(context: Context) -> int:
    return int(context.node_config["partition-id"])


# nFedGNN: a linear map of each user here, stepped by plain gradient descent -----------------------


def relay_app(x: np.ndarray, users_of: dict[int, list[int]], rate: float) -> ClientApp:
    """Clients with the features ``[n, f]`` of some users each."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        size = message.content["config"]["latent-size"]
        users = users_of[here(context)]
        said = {"users": integers(users), "weight-shape": [x.shape[1], size]}
        return reply(message, config=said)

    def answer(message: Message, context: Context) -> Message:
        config, gradient = message.content["config"], message.content["arrays"]["relay"].numpy()
        users, rounds = read(config["users"]), read(config["gradient-round"])
        kept = context.state.array_records.setdefault("weights", ArrayRecord())
        done = context.state.config_records.setdefault("applied", ConfigRecord())
        latent = np.zeros_like(gradient)
        for row, user in enumerate(users.tolist()):
            name = str(user)
            start = np.random.default_rng(0).normal(0, 0.3, (x.shape[1], gradient.shape[1]))
            weight = kept[name].numpy().copy() if name in kept else start.astype(np.float32)
            if rounds[row] > int(done.get(name, 0)):  # once, however often it comes
                weight -= rate * np.outer(x[user], gradient[row])
                done[name] = int(rounds[row])
            kept[name] = Array(weight)
            latent[row] = x[user] @ weight
        metrics = {"num-examples": len(users), "server-round": config["server-round"]}
        return reply(message, arrays={"relay": latent}, metrics=metrics)

    app.train()(answer)
    app.train("finish")(answer)
    return app


# FedSCem in the clear: embeddings that never change ----------------------------------------------


def token(node: int) -> bytes:
    return hashlib.sha256(b"i:%d" % node).digest()[:12]


def ego_app(nodes_of: dict[int, list[int]], embedding: np.ndarray) -> ClientApp:
    """Clients with some nodes each; all embed node ``v`` as ``embedding[v]`` plus their number."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        said = {
            "sum-run": message.content["config"]["sum-run"],
            "sum-clients": integers([here(context)]),
            "sum-channel-key": np.random.default_rng(here(context)).bytes(32),
        }
        return reply(message, config=said)

    @app.train("align")
    def align(message: Message, context: Context) -> Message:
        tokens = [token(node) for node in nodes_of[here(context)]]
        said = {
            "align-clients": integers([here(context)]),
            "align-sizes": integers([len(tokens)]),
            "align-tokens": b"".join(tokens),
        }
        return reply(message, metrics={"num-examples": 1}, config=said)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config, width = message.content["config"], embedding.shape[1]
        if "align-tokens" in config:  # slots are new
            context.state["slots"] = ConfigRecord({"order": config["align-tokens"]})
        order = context.state["slots"]["order"]
        order = [order[at : at + 12] for at in range(0, len(order), 12)]
        count = 0 if config["is-last"] else len(order)
        sums, held = np.zeros((count, width)), np.zeros(count)
        if not config["is-last"]:
            for node in nodes_of[here(context)]:
                if token(node) in order:
                    slot = order.index(token(node))
                    sums[slot], held[slot] = embedding[node] + here(context), 1
        # train, has-train, val, has-val, test, has-test, cross-entropy, contrast, has-contrast,
        # and whether the means of the round before could not be read
        measured = [0.5, 1, 0.25, 1, 0.75, 1, 2.0, 0, 0, 0]
        total = np.concatenate([sums.ravel(), held, measured])
        return reply(
            message,
            sums={"total": total},
            metrics={"num-examples": 1, "server-round": config["server-round"]},
            config={"present": integers([here(context)])},
        )

    @app.train("finish")
    def finish(message: Message, context: Context) -> Message:
        return reply(message, metrics={"num-examples": 1})

    return app


# FedAvg, FedProx and FedGLS: models that get the client's number added ----------------------------


def averaging_app(nodes_of: dict[int, int], trained: list[str], names: list[str]) -> ClientApp:
    """Clients with so many nodes; `trained` and `names` are the metrics that the strategy wants."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return reply(message, config={"clients": integers([here(context)])})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = {name: a.numpy() for name, a in message.content["arrays"].items()}
        found = {name: (v + here(context)).astype(v.dtype) for name, v in model.items()}
        metrics: dict[str, Any] = {"num-examples": nodes_of[here(context)], "clients": 1}
        metrics |= {key: 0.0 for name in trained for key in (name, f"has-{name}")}
        return reply(message, arrays=found, metrics=metrics)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics: dict[str, Any] = {"num-examples": 1, "loss": 0.5}
        for name in names:
            metrics |= {name: 0.25 * here(context), f"has-{name}": 1.0}
        return reply(message, metrics=metrics)

    return app


# PPFL-GNN: embeddings that stay where they are ----------------------------------------------------


def public_app(ids: dict[int, list[int]], vectors: dict[int, np.ndarray]) -> ClientApp:
    """Clients whose public nodes have these ids and vectors ``[p, d]``."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        client = here(context)
        said = {
            "clients": [client],
            "rows": [len(ids[client])],
            "nodes": integers(ids[client]),
            "dimension": vectors[client].shape[1],
        }
        return reply(message, config=said)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, config = here(context), message.content["config"]
        means = message.content["arrays"]["public"].numpy()
        away = float(np.abs(means - vectors[client]).mean()) if config["with-targets"][0] else 0.0
        metrics = {
            "num-examples": len(ids[client]),
            "with-targets": [1],
            "loss": [float(client)],
            "disagreement": [away],
            "judged-val": [0.5],
            "judged-test": [0.25],
        }
        return reply(
            message, arrays={"public": vectors[client].astype(np.float32)}, metrics=metrics
        )

    return app
