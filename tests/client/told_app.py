"""A ClientApp for processes of its own: it answers with its process, and what it was asked."""

import os
import time
from pathlib import Path

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_graph.errors import RefusedError

app, asked = ClientApp(), list[int]()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Count messages in the context's state, and in this process."""
    asked.append(context.node_id)
    before = context.state.metric_records.get("seen", {"count": 0})
    seen = {"count": int(before["count"]) + 1}  # type: ignore[arg-type]
    seen |= {"partition": int(context.node_config.get("partition-id", 0))}
    context.state["seen"] = MetricRecord(dict(seen))
    about = MetricRecord({"process": os.getpid(), "asked": len(asked), **seen})
    return Message(RecordDict({**message.content, "about": about}), reply_to=message)


@app.train("finish")
def finish(message: Message, context: Context) -> Message:
    context.state.clear()
    return Message(RecordDict({"about": MetricRecord({"process": os.getpid()})}), reply_to=message)


@app.train("die")
def die(message: Message, context: Context) -> Message:
    os._exit(1)


@app.train("fail")
def fail(message: Message, context: Context) -> Message:
    context.state["seen"] = MetricRecord({"count": 100})
    raise KeyError("a path of this machine")


@app.train("refuse")
def refuse(message: Message, context: Context) -> Message:
    raise RefusedError("what was asked")


@app.train("hang")
def hang(message: Message, context: Context) -> Message:
    Path(str(message.content["where"]["file"])).write_text(str(os.getpid()))
    time.sleep(600)
    raise AssertionError
