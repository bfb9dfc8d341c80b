"""The command ``flower-graph``: its sub-commands and their options.

Heavy imports (torch, flwr, matplotlib) wait until a command needs them, so that ``show`` and
refusals of settings are immediate.
"""

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

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
    args.words = sys.argv[1:] if argv is None else [*argv]
    handler = logging.StreamHandler()
    handler.setFormatter(Printable("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        for file in getattr(args, "app", None) or ():
            give_file(file.expanduser())
        module = import_module(_COMMANDS[args.command][1], __package__)
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


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text}: a whole number is needed, at least 1")
    return int(text)


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
    for name, (text, _, options) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, allow_abbrev=name != "run")
        if isinstance(options, str):
            _add(command, options)
            continue
        actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
        for action, (about, own) in options.items():
            _add(actions.add_parser(action, help=about, allow_abbrev=False), own)
    return parser


# Options, one a line: name, metavar (a flag has none), [how often it is given], help. A line that
# begins with a bar excludes its neighbours that do. The metavar says the type.
CONFIG = """\
config CONFIG  shipped config (see `flower-graph list`) or path of a YAML file
overrides KEY=VALUE [*]  settings that differ, such as rounds=100 model.name=gat
"""
CONFIG_OR_NONE = CONFIG.replace("CONFIG  ", "CONFIG [?]  ")
APP = """\
--app FILE  Python file with a method of your own: app=NAME then finds it; may be repeated
"""
TRUST = """\
--trust-code  import the code that a run's folder names, and print its name first
"""
SEEDS = "--seeds N,N  one run for each seed, such as 0,1,2\n"
RUN = f"""\
{CONFIG_OR_NONE}{SEEDS}\
| --out DIR  output folder; default: runs/CONFIG-TIME
| --resume DIR  continue the run in this folder from its last checkpoint
--overwrite  delete the run that is in DIR first; any other folder with files is refused
--engine  in this process, or through `flwr run` on Ray; default: in-process
--ray-address HOST:PORT  with --engine flwr: join the Ray cluster with its head there, this machine
  one of it
--supernodes N  number of SuperNodes that share the clients
--every NUMBER  record the accuracy of each client every so many rounds; the same as every=NUMBER
--quiet  print the final summary only
--log-every N  where no bar is drawn, print a line every N rounds; default: 1
--json  print an object for each round on stdout, and the summary on stderr
{APP}{TRUST}"""
PREDICT = f"""\
| run RUN [?]  output folder of a run
| --data-folder DIR  a client's data folder: use the last run that the client took part in
--client NUMBER  print the predictions of this client only; with --data, predict with its model
--data FILE  predict the nodes of this graph, a file or a folder with tables
--links  of a run with task=links: which nodes are linked, by --node or --pairs
| --node NAME  its most likely partners that it lacks
| --pairs FILE.csv  a file with two names a line: how likely each pair is linked
--top N  so many partners
--out FILE.csv  file to write; default: the table is printed
{APP}{TRUST}"""
SWEEP = f"""\
{CONFIG.splitlines()[0]}
overrides KEY=VALUE,VALUE [*]  settings and their values, such as model.hidden=16,64 rounds=100
--seeds N,N  each choice with these seeds, such as 0,1,2; default: the config's
--out DIR  output folder; default: runs/sweep-CONFIG. What is in it is not run again
--optuna N  try N choices that Optuna proposes, also from ranges such as model.hidden=8..64
{APP}"""
COMPARE = """\
runs RUN|FOLDER [+]  output folder of a run, or a folder with runs in it
--by KEY  sort by test, val, seconds, up, ..., or a setting such as model.hidden
--all-settings  a column for each setting that differs; default: the first eight
| --csv  print means and deviations as CSV
| --json  print all settings and figures as JSON
--picture FILE.png  draw means and deviations of the test metric
"""
REPORT = """\
runs RUN [+]  folder of a run, or with runs in it; several are compared
--out FILE.html [!]  the page, one file that needs no other
"""
DOCS = """\
page PAGE [?]  such as own-data, privacy/noise or outputs#metrics; default: the first page
--path  print where it is alone
"""
SHOW = f"{CONFIG}--plain  YAML alone, without explanations\n{APP}"
NEW_METHOD = """\
name NAME  its name, of a Python module: NAME.py, NAME.yaml and test_NAME.py are written
--out DIR  folder; default: this one
"""
CHECK = f"""\
target FILE|FOLDER|CONFIG [?]  file or folder with a graph, name of a data set, shipped config, or
  YAML file
overrides KEY=VALUE [*]  settings that differ, such as data.features=row
--out DIR  folder for check.json and a picture; default: nothing is written
--node NODE-CONFIG  show what a SuperNode with this node config (as for flower-supernode) permits
{APP}"""
PARTITION = f"""\
{CONFIG}\
--seeds N,N  average the figures over these seeds, such as 0,1,2
--out DIR  output folder; default: runs/partition-CONFIG-TIME
--supernodes N  number of SuperNodes to write data folders for; default: one for each client
--true-edges  FedGLS only: give clients without edges their true edges in their data folders
{APP}"""
REPRODUCE = """\
paper PAPER  such as nfedgnn, or a Python file with tables of your own
--out DIR  output folder; default: runs/reproduce-PAPER-TIME
--only KEY=VALUE  run only these rows, such as data=Cora; may be repeated, also with the same key
--seeds N,N  other seeds than the paper's
--rounds N  other rounds than the paper's
--again FOLDER  run the rows of the table in this folder again, and compare the figures
"""
AUDIT = f"""\
{CONFIG_OR_NONE}{SEEDS}\
--out DIR  output folder; default: runs/audit-CONFIG-TIME
--rounds N  number of rounds to record; default: a few, depending on the method
--epsilon E,E  privacy budgets of the additional runs with noise, such as 10,1000; default: 10
--alone  run the config only, not also with more and with less protection
--page DIR  run nothing: write one page about all audits in the sub-folders of this folder
{APP}"""
IDENTITY = {
    "new": (
        "make a key pair: FILE is the secret key, FILE.pub the public one",
        "file FILE  new file, which only you can read",
    ),
}
PARTY = "registry REGISTRY  a JSON file\nparty NUMBER  its number\n"
REGISTRY = {
    "add": (
        "add a SuperNode, to a new file if there is none yet",
        """\
registry REGISTRY  a JSON file
key FILE.pub  its public key
--clients N-N,N [!]  numbers of the clients that it may host, such as 0-99,200
--most-clients N  for a new file: how many clients any one SuperNode may host at most
""",
    ),
    "rotate": ("give a SuperNode another key", f"{PARTY}key FILE.pub  its public key"),
    "revoke": ("declare all signatures of a SuperNode invalid", PARTY),
    "show": (
        "print the SuperNodes of the registry, and its SHA-256",
        "registry REGISTRY  a JSON file",
    ),
}
OPTION = re.compile(r"(\| )?(\S+)(?: ([^\s\[]\S*))?(?: \[(.)\])?  (.*)")
PATHS = "DIR FILE FILE.csv FILE.html FILE.png FILE.pub FOLDER REGISTRY RUN RUN|FOLDER"
TYPES: dict[str, Any] = {"N": _count, "NUMBER": int, "N,N": _seeds}
TYPES |= dict.fromkeys(PATHS.split(), Path)  # by metavar; others are text
MORE: dict[str, dict[str, Any]] = {
    "--app": {"action": "append"},
    "--only": {"action": "append", "default": []},
    "--engine": {"action": "store", "choices": ("in-process", "flwr"), "default": "in-process"},
    "shell": {"action": "store", "choices": ("bash", "zsh", "tcsh"), "help": None},
    "--log-every": {"default": 1},
    "--top": {"default": 10},
    "--epsilon": {"default": "10"},
    "page": {"default": "index"},
}


def _add(parser: argparse.ArgumentParser, options: str) -> None:
    group: argparse._MutuallyExclusiveGroup | None = None
    for line in options.replace("\n  ", " ").splitlines():
        match = OPTION.fullmatch(line)
        assert match is not None, line
        excludes, name, metavar, how, text = match.groups()
        given: dict[str, Any] = {"help": text, "action": "store_true"}
        if metavar:
            given |= {"metavar": metavar, "type": TYPES.get(metavar, str), "action": "store"}
        if how:
            given |= {"required": True} if how == "!" else {"nargs": how}
        if excludes:  # one is required if one of them needs no name
            group = group or parser.add_mutually_exclusive_group(required=name[0] != "-")
        else:
            group = None
        (group or parser).add_argument(name, **given | MORE.get(name, {}))


# In the order of the help; the modules are imported by the command that needs them.
_COMMANDS: dict[str, tuple[str, str, str | dict[str, tuple[str, str]]]] = {
    "run": ("train with a config", ".run", RUN),
    "predict": ("predict the classes of nodes with the models of a run", ".predict", PREDICT),
    "sweep": ("try settings, and choose the best by validation", ".sweep", SWEEP),
    "compare": ("compare runs: settings, figures, costs", ".compare", COMPARE),
    "report": ("write a page about runs, with pictures", ".compare", REPORT),
    "list": ("list methods, configs and data sets", ".overview", ""),
    "docs": ("open or print the documentation, or one page of it", ".documentation", DOCS),
    "show": ("print all settings of a config", ".overview", SHOW),
    "completion": ("print a script that completes commands", ".overview", "shell  "),
    "new-method": ("write a method of your own to start from", ".new_method", NEW_METHOD),
    "check": ("describe a graph, and try the methods on it", ".check", CHECK),
    "partition": ("show which nodes each client gets", ".partition", PARTITION),
    "reproduce": ("run the experiments of a paper's tables", "..reproduce.command", REPRODUCE),
    "audit": ("measure what the server of a run can find out", ".audit", AUDIT),
    "identity": ("make a key pair for a SuperNode", ".identity", IDENTITY),
    "registry": ("list the SuperNodes that take part in secure sums", ".identity", REGISTRY),
}


if __name__ == "__main__":
    sys.exit(main())
