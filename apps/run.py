"""Runs a config on the in-process engine."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flower_graph.client.adaptor import make_client_app
from flower_graph.client.state import forget_run
from flower_graph.client.trust import throwaway_parties
from flower_graph.config.common import ALL, CHECKPOINTS, RunConfig, require_trackers
from flower_graph.config.rules import at_least, require
from flower_graph.data.description import DataForm
from flower_graph.data.folders import party
from flower_graph.data.folders.client_folder import Clients
from flower_graph.data.partition.statistics import class_counts
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import ConfigError, OutputError
from flower_graph.flower_compat import ClientAppCallable, Mod
from flower_graph.method.base import data_form, judged_on
from flower_graph.method.load import to_dict
from flower_graph.method.registry import method_of
from flower_graph.method.trust import TrustSection
from flower_graph.outputs.client import FINISH, KeepRequest, merge_clients, own_outputs
from flower_graph.outputs.client import TYPE as KEEP
from flower_graph.privacy import noise
from flower_graph.records.rounds import RoundReport
from flower_graph.records.warned import counted_warnings
from flower_graph.report.result import describe_baselines
from flower_graph.report.trackers import Trackers
from flower_graph.report.writer import RunWriter, write_config, write_data_form
from flower_graph.secure.node_config import FEWEST_PARTIES, MALICIOUS_SERVER
from flower_graph.server.round_loop import RoundLoop
from flower_graph.simulation import InProcessGrid
from flower_graph.storage import checkpoint
from flower_graph.storage.files import named
from flower_graph.wire.keys import CONFIG as MESSAGE_CONFIG

LOG = logging.getLogger("flwr")
G = TypeVar("G", bound=InProcessGrid)
# A trial's rounds at most, and the seconds after which it is over
TRIED, TRIED_SECONDS = 8, 3.0


def client_app(config: RunConfig, out: Path | None) -> ClientApp:
    """Build the ClientApp of a run."""
    method = method_of(config)
    mods: list[Mod] = [partial(_tell_and_keep, config)]
    mods += [noise.withhold_measurements] if config.privacy.withholds else []
    return make_client_app(
        lambda context: method.build_client(config, context, out),
        mods=mods,
        train_mods=method.train_mods(config),
    )


def _tell_and_keep(
    config: RunConfig, message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Log first what clients with own data reach alone; keep settings with their outputs."""
    kind, method = message.metadata.message_type, method_of(config)
    # The server's first message is a query for clients; a client then has no state yet.
    is_first = kind == "query" and not context.state
    reply = call_next(message, context)
    if is_first and (folder := party.client_folder(config, context)) is not None:
        # There are none without labels
        for line in describe_baselines({"baselines": method.baselines(config, folder)}):
            LOG.info("what clients here reach alone, told to nobody: %s", line)
    if kind == KEEP and not reply.has_error():
        asked = KeepRequest.from_config(message.content.config_records[MESSAGE_CONFIG])
        outputs = own_outputs(context, asked.run) if asked.action == FINISH else None
        if outputs is not None:
            folder = party.client_folder(config, context)
            write_config(outputs, to_dict(config))
            form = (
                data_form(config, method.data(config))
                if folder is None
                else DataForm.from_json(folder.detail(party.DATA_FORM, dict))
            )
            write_data_form(outputs, form)
    return reply


@counted_warnings()
def run_server(
    config: RunConfig,
    grid: Grid,
    out: Path,
    *,
    engine: str,
    resume: bool = False,
    on_round: Callable[[RoundReport], None] | None = None,
    on_wait: Callable[[str], None] | None = None,
    folder: party.RunFolder | None = None,
    title: str = "",
) -> dict[str, object]:
    """Run the method over a grid and write every output.

    ``on_wait`` is called before a round that takes longer than the others, with the reason;
    ``title`` is the name of the config.
    """
    last = partial(checkpoint.last_round, out / CHECKPOINTS)
    if resume:
        last()  # without one, data are not read for nothing
    require_trackers(config.track)
    method, settings = method_of(config), to_dict(config)

    def announce(server_round: int) -> None:
        work = config.long_work(server_round)
        if work and on_wait is not None and server_round <= config.rounds:
            on_wait(f"round {server_round}: {work}")

    # What is refused here leaves no folder.
    asks, words = ALL in config.evaluate, "[own] where nobody has the data of all clients"
    require(folder is None or not asks, "evaluate", config.evaluate, words)
    strategy = make_server(config, grid, out, folder)
    # With a folder nobody has the data of all.
    baselines = {"baselines": method.baselines(config)} if folder is None else {}
    writer = RunWriter(
        out,
        settings,
        resume_round=last if resume else None,
        steadying=config.steadying,
        title=title,
    )
    trackers = Trackers(config.track, writer.out, settings, title)
    try:
        noise.announce_privacy(config)

        def report(entry: RoundReport) -> None:
            noise.note_privacy(config, entry)
            writer.write_round(entry)
            trackers.see(entry)
            if on_round is not None:
                on_round(entry)
            announce(entry.round + 1)

        announce(last() + 1 if resume else 1)
        strategy.start(
            grid,
            num_rounds=config.rounds,
            timeout=config.strategy.timeout,
            on_round=report,
            resume=resume,
            patience=config.patience,
            save=config.save,
            keep=config.keep,
            every=config.every,
            metrics=config.metrics,
            output_dir=out,
        )
        final = {"clients": method.num_clients(config, folder), "engine": engine}
        # What clients withhold stays in the folder of each
        if not config.privacy.withholds and (differ := merge_clients(out)):
            final["spread"] = differ
        if asks:
            try:
                final["evaluated"] = method.judge_all(config, strategy, out)
            except OutputError as error:
                LOG.warning("evaluate: no figures of all clients' nodes: %s", error)
        final |= baselines
        if config.privacy.is_on:
            final["privacy"] = noise.spent(config)
        names = folder.class_names if folder else method.data(config).classes
        if names:
            final["classes"] = list(names)
        if folder is None:
            data = method.data(config)
            final["judged-on"] = judged_on(data)
            if isinstance(data, Clients):
                final["class-counts"] = class_counts(data)
            write_data_form(out, data_form(config, data))
        final |= method.final_figures(config, strategy, folder)
        result = writer.finish(final, strategy.weights())
        trackers.finish(result)
        return result
    finally:
        trackers.finish(None)  # nothing, once it was finished with a result
        writer.close()


def make_server(
    config: RunConfig, grid: Grid, out: Path | None = None, folder: party.RunFolder | None = None
) -> RoundLoop:
    """Build the server's half of a run, which admits the SuperNodes of its list.

    In a simulation whose clients do not trust the server, the SuperNodes get throw-away keys.
    """
    how = config.strategy
    if isinstance(how, TrustSection) and how.distrusts and how.registry is None:
        if folder is not None:
            raise ConfigError(
                "strategy.registry: null; SuperNodes with data folders have keys of their own: "
                "name the server's copy of the registry (`flower-graph docs deployment`)"
            )
        parts, clients = len(list(grid.get_node_ids())), method_of(config).num_clients(config)
        _require_parties(config, parts)
        hosted = [party.assigned(part, parts, clients) for part in range(parts)]
        how = replace(how, registry=str(throwaway_parties(grid.run.run_id, hosted)))
        config = replace(config, strategy=how)
    strategy = method_of(config).build_strategy(config, out, folder)
    # A registry says itself which SuperNode may speak for which client
    members = strategy.session.members
    members.listed = None if folder is None or how.distrusts else party.read_members(folder.path)
    members.most = how.most_supernodes
    return strategy


def _require_parties(config: RunConfig, supernodes: int) -> None:
    if config.strategy.distrusts and supernodes < FEWEST_PARTIES:
        needed = f"strategy.trust={MALICIOUS_SERVER} needs {FEWEST_PARTIES} or more"
        raise ConfigError(f"supernodes: {supernodes} at most, by what is asked for; {needed}")


def check_run(config: RunConfig, supernodes: int | None = None) -> int:
    """Refuse a config that cannot run on this machine; return the number of SuperNodes."""
    require_trackers(config.track)
    resolve_device(config.device)
    clients, count = method_of(config).num_clients(config), supernodes_of(config, supernodes)
    at_least(1).check("supernodes", count)
    _require_parties(config, min(count, clients))
    if count > clients:
        raise ConfigError(f"supernodes: {count} for {clients} clients; at most one each")
    return count


def supernodes_of(config: RunConfig, asked: int | None, usual: int = 1) -> int:
    """Return the number of SuperNodes: that asked for, that the config needs, or the usual one."""
    if asked is None and config.needs_own_nodes:
        return method_of(config).num_clients(config)
    least = FEWEST_PARTIES if config.strategy.distrusts else usual
    return least if asked is None else asked


def run(
    config: RunConfig,
    out: Path,
    *,
    supernodes: int | None = None,
    resume: bool = False,
    progress: Callable[[RoundReport], None] | None = None,
    on_wait: Callable[[str], None] | None = None,
    title: str = "",
) -> dict[str, object]:
    """Run a config in this process and write every output."""
    how: Any = {"engine": "in-process", "resume": resume, "title": title}
    with making_grid(config, InProcessGrid, supernodes, out := named(out)) as grid:
        return run_server(config, grid, out, on_round=progress, on_wait=on_wait, **how)


def simulate(config: RunConfig, *, supernodes: int | None = None) -> list[RoundReport]:
    """Run a config in this process and write nothing."""
    return simulate_whole(config, supernodes=supernodes)[0]


def simulate_whole(
    config: RunConfig,
    *,
    supernodes: int | None = None,
    on_round: Callable[[RoundReport], None] | None = None,
) -> tuple[list[RoundReport], dict[str, object]]:
    """Run a config as ``simulate`` does; also return the final figures of the method."""
    reports: list[RoundReport] = []
    with making_grid(config, InProcessGrid, supernodes) as grid:
        strategy = make_server(config, grid)
        strategy.start(
            grid,
            num_rounds=config.rounds,
            patience=config.patience,
            metrics=config.metrics,
            on_round=on_round or reports.append,
        )
        return reports, method_of(config).final_figures(config, strategy)


class _EnoughError(Exception):
    """Ends a trial run."""


def first_rounds(config: RunConfig) -> list[RoundReport]:
    """Run the first rounds and write nothing: at most eight, for a few seconds.

    At least two rounds are run: the first includes the start, which later rounds do not have.
    """
    reports: list[RoundReport] = []

    def on_round(report: RoundReport) -> None:
        reports.append(report)
        later = sum(one.seconds for one in reports[1:])
        if len(reports) == TRIED or later > TRIED_SECONDS:
            raise _EnoughError

    with suppress(_EnoughError):
        simulate_whole(config, on_round=on_round)
    return reports


@contextmanager
def making_grid(
    config: RunConfig, kind: type[G], given: int | None = None, out: Path | None = None
) -> Iterator[G]:
    """Make the grid of a checked run in this process; forget the run's clients at the end."""
    supernodes = check_run(config, given)
    # Flower's own strategies write a dozen lines a round; here the progress bar says it in one.
    LOG.setLevel(logging.WARNING)
    grid = kind(client_app(config, out), num_supernodes=supernodes, seed=config.seed)
    try:
        yield grid
    finally:
        forget_run(grid.run.run_id)
