"""The ServerApp: reads the config, builds the strategy, starts it."""

import logging
from datetime import UTC, datetime
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_graph.apps.common import configured, run_server
from flower_graph.apps.data_folders import server_folder
from flower_graph.report import RoundReport, format_round
from flower_graph.state import forget_run

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configured method."""
    config, out = configured(context)
    resume = bool(context.run_config.get("resume", False))
    folder = server_folder(config, str(context.run_config.get("server-folder", "")))
    if out is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        out = Path.home() / "flower-graph-runs" / f"{config.app}-{stamp}"
    log = logging.getLogger("flwr")

    def on_round(report: RoundReport) -> None:
        log.info(format_round(report, config.rounds))

    try:
        result = run_server(
            config,
            grid,
            out,
            engine="flwr",
            resume=resume,
            on_round=on_round,
            folder=folder,
        )
        log.info("test accuracy at best validation %.4f", result["test-accuracy-at-best-val"])
        log.info("outputs in %s", out)
    finally:
        forget_run(context.run_id)
