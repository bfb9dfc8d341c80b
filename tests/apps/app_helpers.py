"""Configs, contexts and a pool of this process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flwr.app import Context, RecordDict

from flower_graph.config.common import RunConfig

MakeConfig = Callable[..., RunConfig]


def context_of(node_config: dict[str, Any], run_config: dict[str, Any] | None = None) -> Context:
    return Context(1, 2, node_config, RecordDict(), run_config or {})


class InlinePool(ThreadPoolExecutor):
    """Runs what is submitted one after the other, in this process."""

    def __init__(self, workers: int, context: Any, **how: Any) -> None:
        super().__init__(max_workers=1)
