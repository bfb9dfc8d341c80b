"""The command ``flower-graph audit``: what the server learns, with and without protection.

The command runs a config with a recording grid and attacks the record as a curious server would.
"""

import argparse
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean

from flower_graph.apps.cli.run import NO_CONFIG, default_folder, of_seeds
from flower_graph.apps.cli.say import say, withheld
from flower_graph.apps.run import check_run, make_server, making_grid
from flower_graph.audit import attacks
from flower_graph.audit.deviating import DeviatingGrid
from flower_graph.config.common import RunConfig
from flower_graph.config.rules import ABOVE_ZERO
from flower_graph.errors import AlignmentError, ConfigError, NoClientsError, OutputError
from flower_graph.method.load import load_config, to_dict
from flower_graph.method.registry import method_named, method_of
from flower_graph.report.result import versions
from flower_graph.storage.files import new_folder, write_json, write_text
from flower_graph.storage.reading import Tree, read_json, reading

JSON, PAGE, PICTURE = "audit.json", "audit.md", "audit.png"
INDEX = "README.md"


def settings_of(
    name: str, overrides: Sequence[str], rounds: int | None, epsilons: Sequence[float], alone: bool
) -> list[tuple[str, RunConfig]]:
    """List the runs of an audit, by name: the config itself, then more and less protected forms."""
    local = load_config(name, overrides)
    audit = _audit_of(local)
    count = min(local.rounds, audit.rounds) if rounds is None else rounds
    noisy = [[f"privacy.epsilon={budget:g}"] for budget in epsilons]
    more = [[]] if alone else audit.counterparts(local, noisy)
    result: list[tuple[str, RunConfig]] = []
    for extra in more:
        config = load_config(name, [*overrides, *extra, f"rounds={count}", *audit.shorter])
        if all(config != other for _, other in result):
            result.append((audit.label(config), config))
    return result


def audit_run(config: RunConfig) -> tuple[list[attacks.Finding], float]:
    """Run a config with a recording grid and attack the record."""
    started = time.perf_counter()
    method, audit = method_of(config), _audit_of(config)
    nodes = 1 if audit.one_supernode else method.num_clients(config)
    with making_grid(config, attacks.RecordingGrid, nodes) as grid:
        make_server(config, grid).start(grid, num_rounds=config.rounds)
        findings = audit.attack(config, grid, method)
    for deviation in audit.deviations(config, method):
        findings.append(_deviating_run(config, deviation, nodes))
    return findings, time.perf_counter() - started


def _deviating_run(config: RunConfig, deviation: attacks.Deviation, nodes: int) -> attacks.Finding:
    # Clients that refuse what a deviating server asks may end the run: that is the result, not news
    with (
        making_grid(config, DeviatingGrid, nodes) as grid,
        withheld("flower_graph", logging.ERROR),
        suppress(AlignmentError, NoClientsError),
    ):
        strategy = make_server(config, grid)
        grid.patch = partial(deviation.patch, strategy)
        strategy.start(grid, num_rounds=2)
    assert deviation.told, f"{deviation.name}: the run ended before the server could lie"
    return deviation.finding()


def _audit_of(config: RunConfig) -> attacks.Audit[RunConfig]:
    audit = method_of(config).audit()
    if audit is None:
        raise ConfigError(f"app: {config.app} has no audit: its method names no attack")
    audit.refuse(config)
    if config.privacy.is_central:
        raise ConfigError(
            "privacy.form: central is not audited: the server, who adds the noise, sees what "
            "clients send without it; set privacy.form=local or privacy.epsilon=null"
        )
    return audit


def audit_command(args: argparse.Namespace) -> int:
    """Audit a config, print and write a table; or write one page about earlier audits."""
    if args.page is not None:
        if args.config is not None:
            raise ConfigError(f"--page {args.page}: runs nothing, so leave {args.config} out")
        say(write_index(args.page))
        return 0
    if args.config is None:
        raise ConfigError(NO_CONFIG)
    if args.rounds is not None and args.rounds < 2:
        raise ConfigError(f"--rounds {args.rounds}: at least 2 are needed")
    how = {"rounds": args.rounds, "epsilons": parse_epsilons(args.epsilon), "alone": args.alone}
    seeds = of_seeds(args.seeds)
    plans = [settings_of(args.config, [*args.overrides, *local], **how) for local in seeds]
    for _, config in plans[0]:
        check_run(config)
    with new_folder(args.out or default_folder(args.config, "audit-")) as out:
        record = _audit(args, plans)
        shown = attacks.page(record, _notes(record))
        from flower_graph.report.plots import save_audit  # slow to import

        write_json(out / JSON, record)
        write_text(out / PAGE, f"{shown}\n{attacks.EVERYWHERE}\n")
        title = f"{record['config']}: what the server learns"
        save_audit(out / PICTURE, record["findings"], title=title)
        say(shown, attacks.EVERYWHERE, f"\nwritten to {out}")
    return 0


def parse_epsilons(text: str) -> list[float]:
    """Read budgets such as ``10,1000``; each is a number above 0."""
    try:
        budgets = [float(part) for part in text.split(",")]
    except ValueError:
        budgets = [0.0]
    for budget in budgets:
        ABOVE_ZERO.check(f"--epsilon {text}", budget)
    return budgets


def write_index(folder: Path) -> Path:
    """Write one page about all audits in the sub-folders of a folder."""
    parts = []
    for path in sorted(folder.glob(f"*/{JSON}")):
        with reading(path, OutputError, "not the result of an audit"):
            record = read_json(path)
            picture = f"![{record['config']}]({path.parent.name}/{PICTURE})"
            parts.append(f"{attacks.page(record, _notes(record), level=2)}\n{picture}\n")
    if not parts:
        raise OutputError(f"--page {folder}: no sub-folder has {JSON}; run an audit first")
    head = f"# Privacy audit\n\nWritten by `flower-graph audit --page`. {attacks.EVERYWHERE}\n"
    write_text(folder / INDEX, "\n".join([head, *parts]))
    return folder / INDEX


def _notes(record: Tree) -> Sequence[str]:
    audit = method_named(record["app"]).audit()
    notes = () if audit is None else audit.notes
    lies = any(one["attack"].startswith("deviating server") for one in record["findings"])
    return [*notes, *([attacks.DEVIATING] if lies else ())]


def _audit(args: argparse.Namespace, plans: Sequence[Sequence[tuple[str, RunConfig]]]) -> Tree:
    findings, settings, first = [], [], plans[0][0][1]
    for same in zip(*plans, strict=True):  # one setting, with each seed
        (name, config), results, seconds = same[0], [], []
        for _, local in same:
            found, spent = audit_run(local)
            results.append(found)
            seconds.append(spent)
            say(f"{name}, seed {local.seed}: {spent:.0f} s", to=sys.stderr)
        findings += attacks.findings_of(name, results)
        settings.append({"name": name, "seconds": fmean(seconds), "config": to_dict(config)})
    return {
        "config": args.config,
        "command": shlex.join(["flower-graph", *args.words]),
        "app": first.app,
        "rounds": first.rounds,
        "seeds": [plan[0][1].seed for plan in plans],
        "settings": settings,
        "findings": findings,
        "versions": versions(),
    }
