"""The command ``flower-graph check``: a description of a graph, and a trial of each method."""

import argparse
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import psutil
import torch
from click import ClickException

from flower_graph.apps.cli.say import say, withheld
from flower_graph.apps.run import check_run, first_rounds
from flower_graph.config.common import RunConfig
from flower_graph.data.baselines import says_one_class
from flower_graph.data.partition.statistics import (
    Description,
    holdings,
    is_heterophilous,
    lines,
    survey,
    survey_graph,
)
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import ConfigError, DataError, RefusedError, brief
from flower_graph.method.base import as_graph
from flower_graph.method.load import is_file_name, list_configs, load_config, to_dict
from flower_graph.method.permits import Permits
from flower_graph.method.registry import known_apps, method_of
from flower_graph.records.rounds import format_bytes
from flower_graph.report.result import baseline_figures, worth_trying
from flower_graph.storage.files import new_folder, write_json
from flower_graph.storage.reading import Tree

OWN = "own-graph"  # the config of each method that fits any data
CLIENT = "flower_graph.client.module_client"  # which says whether clients train one by one
JSON, PICTURE = "check.json", "check.png"


def check_command(args: argparse.Namespace) -> int:
    """Describe a graph, try each method on it, print the results and write them if asked."""
    if args.node is not None:
        return _check_node(args.node, args.target, args.overrides)
    if args.target is None:
        raise ConfigError("check: name data or a config, or --node NODE-CONFIG")
    configs = _configs(args.target, args.overrides)
    first = next(iter(configs.values()))
    resolve_device(first.device)
    description = survey(first)
    with new_folder(args.out) if args.out else nullcontext() as out:
        named = [("data", line) for line in lines(description)]
        named += [("note", note) for note in description.notes]
        named += [("warning", warning) for warning in description.warnings]
        say(args.target, *(f"  {name:9}  {text}" for name, text in named))
        tried = {name: _tried(name, config, description) for name, config in configs.items()}
        refusals: dict[str, list[str]] = {}  # each reason once, with its configs
        for name, result in tried.items():
            if "refused" in result:
                refusals.setdefault(str(result["refused"]), []).append(name)
        for why, names in refusals.items():
            say(f"{', '.join(names)}\n  cannot     {why}")
        if out is not None:
            from flower_graph.report.plots import plot_counts  # slow to import

            plot_counts(out / PICTURE, description.distributions, title=args.target)
            methods = {name: {"config": to_dict(configs[name]), **tried[name]} for name in configs}
            record = {"target": args.target, **description._asdict(), "methods": methods}
            write_json(out / JSON, record)
            say(f"written to {out}")
    return 0


def _check_node(text: str, target: str | None, overrides: Sequence[str]) -> int:
    from flower_graph.flower_compat import parse_config_args  # loads requests, which a run does not

    try:
        node = parse_config_args([text])
    except ClickException:
        node = {}
    if text.strip() and not node:
        words = f"{brief(text)} is no node config; write 'most-epsilon=2 a=\"b\"'"
        raise ConfigError(f"--node: {words}")
    permits, refused = Permits.of(dict(node)), False
    say("this SuperNode permits", *(f"  {line}" for line in permits.lines()))
    for name, config in _configs(target, overrides).items() if target is not None else ():
        try:
            permits.check(config)
            say(f"{name}\n  takes part")
        except RefusedError as error:
            refused = True
            say(f"{name}\n  refuses: {error}")
    return int(refused)


def short_form(config: RunConfig) -> tuple[list[str], list[str]]:
    """Describe the data of a run in a few lines; return warnings separately."""
    method = method_of(config)
    held = method.data(config)
    data, clients = as_graph(held), holdings(held, method.num_clients(config), method.clients)
    if data.x.layout != torch.strided:  # generated, and too large to look at before a run
        size = f"{data.num_nodes:,} nodes, {data.edge_index.size(1) // 2:,} edges, generated"
        return [f"the graph: {size}", f"clients: {clients}"], []
    description = survey_graph(data)
    graph, _, *others = lines(description)  # notes say of features what was done to them
    facts = [f"the graph: {graph}", f"clients: {clients}", *others]
    return facts, [*description.warnings, *_warnings(config, description)]


def _warnings(config: RunConfig, description: Description) -> list[str]:
    caveat = method_of(config).heterophily
    return [caveat] if caveat and is_heterophilous(description.figures) else []


def _configs(target: str, overrides: Sequence[str]) -> dict[str, RunConfig]:
    if target in (shipped := list_configs()) or is_file_name(target):
        return {target: load_config(target, overrides)}
    data = f"data.name={Path(target)}{'/' if target.endswith('/') else ''}"
    result, why = {}, None
    for name in [name for app in known_apps() if (name := f"{app}/{OWN}") in shipped]:
        try:
            result[name] = load_config(name, [data, *overrides])
        except ConfigError as error:  # one method may lack a setting that another has
            why = error
    if why is not None and not result:
        raise why
    return result


def _tried(name: str, config: RunConfig, description: Description) -> Tree:
    method = method_of(config)
    try:
        check_run(config)
        given = as_graph(method.data(config)).notes
        cut = method.partition(config)
        with (
            withheld("flower_graph", logging.WARNING) as said,
            withheld(CLIENT, logging.INFO) as more,
        ):
            seconds = [report.seconds for report in first_rounds(config)]
    except (ConfigError, DataError) as error:
        return {"refused": str(error)}
    caveat = says_one_class(cut.baselines) if method.needs_variety else ""
    first, each = seconds[0], median(seconds[1:] or seconds)
    heard, warned = ([one.getMessage() for one in records] for records in (more, said))
    clients = method.num_clients(config)
    result = {
        "notes": [*(note for note in given if note not in description.notes), *heard],
        "clients": clients,
        "holdings": holdings(method.data(config), clients, method.clients),
        "warnings": [*filter(None, [*_warnings(config, description), caveat, *warned])],
        "figures": cut.statistics.figures,
        "distributions": cut.statistics.distributions,
        "baselines": cut.baselines,
        "seconds": {"first-round": first, "per-round": each},
        # A process keeps the memory that its rounds freed, so this is the most that they took
        "memory-bytes": psutil.Process().memory_info().rss,
    }
    figures = baseline_figures(cut.baselines)
    tries = worth_trying(to_dict(config)) if figures else []
    say(
        name,
        f"  clients    {result['holdings']}",
        *(f"  note       {note}" for note in result["notes"]),
        f"  baselines  {', '.join(figures) or 'none'} (test, without the method)",
        *(f"  try        {' or '.join(tries)}, if that is not reached" for _ in tries[:1]),
        f"  cost       {each:.2g} s a round, the first {first:.2g} s: about "
        f"{first + (config.rounds - 1) * each:.0f} s for {config.rounds} rounds; "
        f"{format_bytes(result['memory-bytes'])} of memory",
        *(f"  warning    {warning}" for warning in result["warnings"]),
    )
    return result
