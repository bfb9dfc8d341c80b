"""The command ``flower-graph``: its sub-commands and their options.

Heavy imports (torch, flwr, matplotlib) wait until a command needs them, so that ``show`` and
refusals of settings are immediate.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from flower_graph import __version__, errors
from flower_graph.apps.cli.say import Printable, say
from flower_graph.method.registry import give_file

# All named errors are told in one line, without a traceback: a user can act on them.
OUR_ERRORS = tuple(
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
EXIT_CODES = (
    "exit codes: 0 done; 1 the run failed, or what was compared differs; 2 a wrong command, "
    "setting, file or data, or a run that cannot go on; 130 interrupted; 141 nobody reads the "
    "output any more"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    parser = make_parser()
    # argparse cannot take overrides on both sides of an option (`a=1 --seeds 0 b=2`) by itself.
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    handler = logging.StreamHandler()
    handler.setFormatter(Printable("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        for file in getattr(args, "app", None) or ():
            give_file(file.expanduser())
        module = import_module(_COMMANDS[args.command][2], __package__)
        status: int = getattr(module, f"{args.command.replace('-', '_')}_command")(args)
        return status
    except (errors.ClientBugError, errors.EngineFailedError) as error:
        say(f"error: {error}", to=sys.stderr)
        return 1
    except OUR_ERRORS as error:
        say(f"error: {error}", to=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`head`) has enough. Python would complain when it closes the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if len({int(part) for part in parts if part.isascii() and part.isdigit()}) < len(parts):
        words = f"{text!r}: write whole numbers with commas, none twice, such as 0,1,2"
        raise argparse.ArgumentTypeError(words)
    return [*map(int, parts)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands, from which the page on commands is made too."""
    parser = _Parser(
        prog="flower-graph",
        description="Federated learning on graphs whose clients are tiny, for Flower.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flower-graph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, add_options, _) in _COMMANDS.items():
        add_options(commands.add_parser(name, help=text, allow_abbrev=name != "run"))
    return parser


def _add_config(
    parser: argparse.ArgumentParser,
    nargs: str | None = None,
    overrides: str = "settings that differ, such as rounds=100 model.name=gat",
    values: str = "KEY=VALUE",
) -> None:
    help_config = "shipped config (see `flower-graph list`) or path of a YAML file"
    parser.add_argument("config", metavar="CONFIG", nargs=nargs, help=help_config)
    parser.add_argument("overrides", nargs="*", metavar=values, help=overrides)


def _add_app(parser: argparse.ArgumentParser, *, trusts: bool = False) -> None:
    help_app = "Python file with a method of your own: app=NAME then finds it; may be repeated"
    parser.add_argument("--app", action="append", type=Path, metavar="FILE", help=help_app)
    if trusts:
        help_trust = "import the code that a run's folder names, and print its name first"
        parser.add_argument("--trust-code", action="store_true", help=help_trust)


def _add_out(parser: argparse._ActionsContainer, name: str) -> None:
    text = f"output folder; default: runs/{name}-TIME"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)


def _add_seeds(
    parser: argparse.ArgumentParser, text: str = "one run for each seed, such as 0,1,2"
) -> None:
    parser.add_argument("--seeds", type=_seeds, metavar="N,N", help=text)


def _add_report(parser: argparse.ArgumentParser) -> None:
    help_runs = "folder of a run, or with runs in it; several are compared"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=help_runs)
    help_out = "the page, one file that needs no other"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.html", help=help_out)


def _add_docs(parser: argparse.ArgumentParser) -> None:
    help_page = "such as own-data, privacy/noise or outputs#metrics; default: the first page"
    parser.add_argument("page", nargs="?", default="index", metavar="PAGE", help=help_page)
    parser.add_argument("--path", action="store_true", help="print where it is alone")


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--plain", action="store_true", help="YAML alone, without explanations")
    _add_app(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_config(parser, nargs="?")
    _add_seeds(parser)
    folder = parser.add_mutually_exclusive_group()
    _add_out(folder, "CONFIG")
    help_resume = "continue the run in this folder from its last checkpoint"
    folder.add_argument("--resume", type=Path, metavar="DIR", help=help_resume)
    help_overwrite = "delete the run that is in DIR first; any other folder with files is refused"
    parser.add_argument("--overwrite", action="store_true", help=help_overwrite)
    engines = ("in-process", "flwr")
    help_engine = "in this process, or through `flwr run` on Ray; default: in-process"
    parser.add_argument("--engine", choices=engines, default=engines[0], help=help_engine)
    help_ray = (
        "with --engine flwr: join the Ray cluster with its head there, this machine one of it"
    )
    parser.add_argument("--ray-address", metavar="HOST:PORT", help=help_ray)
    help_nodes = "number of SuperNodes that share the clients"
    parser.add_argument("--supernodes", type=int, metavar="N", help=help_nodes)
    help_every = "record the accuracy of each client every N rounds; the same as every=N"
    parser.add_argument("--every", metavar="N", help=help_every)
    parser.add_argument("--quiet", action="store_true", help="print the final summary only")
    help_log = "where no bar is drawn, print a line every N rounds; default: 1"
    parser.add_argument("--log-every", type=int, default=1, metavar="N", help=help_log)
    help_json = "print an object for each round on stdout, and the summary on stderr"
    parser.add_argument("--json", action="store_true", help=help_json)
    _add_app(parser, trusts=True)


def _add_predict(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("run", type=Path, metavar="RUN", nargs="?", help="output folder of a run")
    help_folder = "a client's data folder: use the last run that the client took part in"
    source.add_argument("--data-folder", type=Path, metavar="DIR", help=help_folder)
    help_client = "print the predictions of this client only; with --data, predict with its model"
    parser.add_argument("--client", type=int, metavar="N", help=help_client)
    help_data = "predict the nodes of this graph, a file or a folder with tables"
    parser.add_argument("--data", type=Path, metavar="FILE", help=help_data)
    help_links = "of a run with task=links: which nodes are linked, by --node or --pairs"
    parser.add_argument("--links", action="store_true", help=help_links)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--node", metavar="NAME", help="its most likely partners that it lacks")
    help_pairs = "a file with two names a line: how likely each pair is linked"
    which.add_argument("--pairs", type=Path, metavar="FILE.csv", help=help_pairs)
    parser.add_argument("--top", type=int, default=10, metavar="K", help="so many partners")
    help_out = "file to write; default: the table is printed"
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help=help_out)
    _add_app(parser, trusts=True)


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    help_values = "settings and their values, such as model.hidden=16,64 rounds=100"
    _add_config(parser, overrides=help_values, values="KEY=VALUE,VALUE")
    _add_seeds(parser, "each choice with these seeds, such as 0,1,2; default: the config's")
    text = "output folder; default: runs/sweep-CONFIG. What is in it is not run again"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    help_optuna = "try N choices that Optuna proposes, also from ranges such as model.hidden=8..64"
    parser.add_argument("--optuna", type=int, metavar="N", help=help_optuna)
    _add_app(parser)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    help_runs = "output folder of a run, or a folder with runs in it"
    parser.add_argument("runs", type=Path, metavar="RUN|FOLDER", nargs="+", help=help_runs)
    help_by = "sort by test, val, seconds, up, ..., or a setting such as model.hidden"
    parser.add_argument("--by", metavar="KEY", help=help_by)
    help_all = "a column for each setting that differs; default: the first eight"
    parser.add_argument("--all-settings", action="store_true", help=help_all)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print means and deviations as CSV")
    form.add_argument("--json", action="store_true", help="print all settings and figures as JSON")
    help_picture = "draw means and deviations of the test metric"
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help=help_picture)


def _add_check(parser: argparse.ArgumentParser) -> None:
    help_target = "file or folder with a graph, name of a data set, shipped config, or YAML file"
    parser.add_argument("target", nargs="?", metavar="FILE|FOLDER|CONFIG", help=help_target)
    help_overrides = "settings that differ, such as data.features=row"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=help_overrides)
    help_out = "folder for check.json and a picture; default: nothing is written"
    parser.add_argument("--out", type=Path, metavar="DIR", help=help_out)
    help_node = "show what a SuperNode with this node config (as for flower-supernode) permits"
    parser.add_argument("--node", metavar="NODE-CONFIG", help=help_node)
    _add_app(parser)


def _add_partition(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    _add_seeds(parser, "average the figures over these seeds, such as 0,1,2")
    _add_out(parser, "partition-CONFIG")
    help_nodes = "number of SuperNodes to write data folders for; default: one for each client"
    parser.add_argument("--supernodes", type=int, metavar="N", help=help_nodes)
    help_edges = "FedGLS only: give clients without edges their true edges in their data folders"
    parser.add_argument("--true-edges", action="store_true", help=help_edges)
    _add_app(parser)


def _add_reproduce(parser: argparse.ArgumentParser) -> None:
    help_paper = "such as nfedgnn, or a Python file with tables of your own"
    parser.add_argument("paper", metavar="PAPER", help=help_paper)
    _add_out(parser, "reproduce-PAPER")
    help_only = "run only these rows, such as data=Cora; may be repeated, also with the same key"
    parser.add_argument("--only", action="append", default=[], metavar="KEY=VALUE", help=help_only)
    _add_seeds(parser, "other seeds than the paper's")
    parser.add_argument("--rounds", type=int, metavar="N", help="other rounds than the paper's")
    help_again = "run the rows of the table in this folder again, and compare the figures"
    parser.add_argument("--again", type=Path, metavar="FOLDER", help=help_again)


def _add_audit(parser: argparse.ArgumentParser) -> None:
    _add_config(parser, nargs="?")
    _add_seeds(parser)
    _add_out(parser, "audit-CONFIG")
    help_rounds = "number of rounds to record; default: a few, depending on the method"
    parser.add_argument("--rounds", type=int, metavar="N", help=help_rounds)
    help_epsilon = "privacy budgets of the additional runs with noise, such as 10,1000; default: 10"
    parser.add_argument("--epsilon", default="10", metavar="E,E", help=help_epsilon)
    help_alone = "run the config only, not also with more and with less protection"
    parser.add_argument("--alone", action="store_true", help=help_alone)
    help_page = "run nothing: write one page about all audits in the sub-folders of this folder"
    parser.add_argument("--page", type=Path, metavar="DIR", help=help_page)
    _add_app(parser)


def _add_new_method(parser: argparse.ArgumentParser) -> None:
    help_name = "its name, of a Python module: NAME.py, NAME.yaml and test_NAME.py are written"
    parser.add_argument("name", metavar="NAME", help=help_name)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder; default: this one")


def _add_identity(parser: argparse.ArgumentParser) -> None:
    action = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "make a key pair: FILE is the secret key, FILE.pub the public one"
    new = action.add_parser("new", help=text)
    new.add_argument("file", type=Path, metavar="FILE", help="new file, which only you can read")


def _add_registry(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    words = {
        "add": "add a SuperNode, to a new file if there is none yet",
        "rotate": "give a SuperNode another key",
        "revoke": "declare all signatures of a SuperNode invalid",
        "show": "print the SuperNodes of the registry, and its SHA-256",
    }
    for name, text in words.items():
        action = actions.add_parser(name, help=text, allow_abbrev=False)
        action.add_argument("registry", type=Path, metavar="REGISTRY", help="a JSON file")
        if name in ("rotate", "revoke"):
            action.add_argument("party", type=int, metavar="PARTY", help="its number")
        if name in ("add", "rotate"):
            action.add_argument("key", type=Path, metavar="FILE.pub", help="its public key")
        if name == "add":
            help_clients = "numbers of the clients that it may host, such as 0-99,200"
            action.add_argument("--clients", required=True, metavar="N-N,N", help=help_clients)
            help_most = "for a new file: how many clients any one SuperNode may host at most"
            action.add_argument("--most-clients", type=int, metavar="N", help=help_most)


# In the order of the help; the modules are imported by the command that needs them.
_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], object], str]] = {
    "run": ("train with a config", _add_run, ".run"),
    "predict": ("predict the classes of nodes with the models of a run", _add_predict, ".predict"),
    "sweep": ("try settings, and choose the best by validation", _add_sweep, "..sweep.command"),
    "compare": ("compare runs: settings, figures, costs", _add_compare, ".compare"),
    "report": ("write a page about runs, with pictures", _add_report, ".compare"),
    "list": ("list methods, configs and data sets", lambda _: None, ".overview"),
    "docs": ("open or print the documentation, or one page of it", _add_docs, ".documentation"),
    "show": ("print all settings of a config", _add_show, ".overview"),
    "completion": (
        "print a script that completes commands",
        lambda parser: parser.add_argument("shell", choices=("bash", "zsh", "tcsh")),
        ".overview",
    ),
    "new-method": ("write a method of your own to start from", _add_new_method, ".new_method"),
    "check": ("describe a graph, and try the methods on it", _add_check, ".check"),
    "partition": ("show which nodes each client gets", _add_partition, ".partition"),
    "reproduce": ("run the experiments of a paper's tables", _add_reproduce, "..reproduce.command"),
    "audit": ("measure what the server of a run can find out", _add_audit, ".audit"),
    "identity": ("make a key pair for a SuperNode", _add_identity, ".identity"),
    "registry": ("list the SuperNodes that take part in secure sums", _add_registry, ".identity"),
}


if __name__ == "__main__":
    sys.exit(main())
