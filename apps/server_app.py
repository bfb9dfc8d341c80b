"""The ServerApp: reads the config, builds the strategy, starts it."""

import logging
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_graph.apps.client_app import CLIENTS
from flower_graph.apps.run import run_server
from flower_graph.client.state import forget_run
from flower_graph.config.rules import NOT_NEGATIVE
from flower_graph.data.folders.party import server_folder
from flower_graph.flower_compat import is_simulation
from flower_graph.handed import noted
from flower_graph.method.load import title_of
from flower_graph.method.permits import configured
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import format_round
from flower_graph.report.result import describe_baselines
from flower_graph.storage.files import named

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configured method."""
    (config, out), given = configured(context), context.run_config
    folder = server_folder(config, str(given.get("server-folder", "")))
    if out is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        out = named(Path.home()) / "flower-graph-runs" / f"{config.app}-{stamp}"
    log, clients = logging.getLogger("flwr"), method_of(config).clients
    # Each process of a SuperNode imports torch and reads its data before it answers.
    log.info("waiting for SuperNodes, which start and read their data; then round 1 begins")
    try:
        with _workers(grid, context, out):
            result = run_server(
                config,
                grid,
                out,
                engine="flwr",
                resume=bool(given.get("resume", False)),
                on_round=lambda report: log.info(format_round(report, config.rounds, clients)),
                on_wait=log.info,
                folder=folder,
                title=title_of(str(given.get("config", ""))),
            )
        accuracy = result["test-accuracy-at-best-val"]  # None where clients withhold theirs
        if accuracy is not None:
            log.info("test accuracy at best validation %.4f", accuracy)
        for line in describe_baselines(result):
            log.info("%s", line)
        log.info("outputs in %s", out)
    finally:
        forget_run(context.run_id)


def _workers(grid: Grid, context: Context, out: Path) -> AbstractContextManager[None]:
    if not is_simulation(grid):
        return nullcontext()
    from flower_graph.client.ray_workers import GPUS, OnRay, ray_workers, wait_for_ray

    with noted() as made:
        config, _ = configured(context)
        method_of(config).num_clients(config)  # it makes the data, which the server needs too
    wait_for_ray()
    try:
        gpus = float(str(context.run_config.get(GPUS) or 0))
    except ValueError:
        gpus = -1.0
    NOT_NEGATIVE.check(GPUS, gpus)
    supernodes = len(list(grid.get_node_ids()))
    return ray_workers(OnRay(context.run_id, CLIENTS, supernodes, out, gpus), made)
