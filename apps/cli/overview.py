"""The commands ``flower-graph list``, ``show`` and ``completion``."""

import argparse
import re
from collections.abc import Iterator
from textwrap import TextWrapper
from typing import Any

from flower_graph.apps.cli.main import make_parser
from flower_graph.apps.cli.say import hand_over, say
from flower_graph.config.common import RunConfig
from flower_graph.config.rules import require_library
from flower_graph.config.schema import settings_of
from flower_graph.data.sources.names import HERE, known_names, presence
from flower_graph.method.load import (
    data_name_of,
    describe_config,
    list_configs,
    load_config,
    to_yaml,
)
from flower_graph.method.registry import describe_app, known_apps

OTHER_DATA = (
    "any other data set of PyG for node classification, as Class or Class/name",
    "the path of a graph of your own: a PyG Data (.pt), GraphML, JSON, a folder of tables or of "
    "clients",
)
WIDTH = 100  # of lines with explanations
KEY = re.compile(r"^( *)([^ :#'\"-][^:]*):(.*)$")  # of a line of YAML: indentation, name, value


def list_command(args: argparse.Namespace) -> int:
    """Print methods, data sets, and configs with whether their data are there."""
    apps, configs = known_apps(), list_configs()
    width = max(map(len, (*apps, *configs)))
    say("methods (app):", *(f"  {name:{width}}  {describe_app(name)}".rstrip() for name in apps))
    say("configs (CONFIG), and where their data are if they do not come with the package:")
    for name in configs:
        where = presence(data_name_of(name))
        note = "" if where == HERE else f" [{where}]"
        say(f"  {name:{width}}  {describe_config(name)}{note}".rstrip())
    say("data sets (data.name):", *(f"  {line}" for line in (*known_names(), *OTHER_DATA)))
    return 0


def show_command(args: argparse.Namespace) -> int:
    """Print all settings of a config, as YAML for ``run``."""
    config = load_config(args.config, args.overrides)
    hand_over(to_yaml(config) if args.plain else explained(config))
    return 0


def explained(config: RunConfig) -> str:
    """Return the settings as YAML, with meaning, type and allowed values as comments."""
    about = dict[str, str]()
    for one in settings_of(type(config)):
        allowed = ", ".join([one.wanted, *(rule.words for rule in one.rules)])
        about[one.key] = f"{' '.join(one.help.split())} ({allowed})" if one.help else allowed
    result, sections = list[str](), list[str]()
    for line in to_yaml(config).splitlines():
        if (match := KEY.match(line)) is not None:
            sections = [*sections[: len(match[1]) // 2], match[2]]
            mark, words = f"{match[1]}# ", about.get(".".join(sections), "")
            fill = TextWrapper(WIDTH, mark, mark, break_on_hyphens=False, break_long_words=False)
            # Above, since a text may go on in the next line
            result += fill.wrap(words)
        result.append(line)
    return "\n".join([*result, ""])


def completion_command(args: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    require_library("shtab", "completion", extra="completion")
    import shtab

    parser = make_parser()
    for action in _actions(parser):
        if action.dest == "config" or action.metavar == "CONFIG":
            action.complete = {"bash": "_flower_graph_configs", "zsh": "_files"}
        elif action.metavar in ("DIR", "FOLDER"):
            action.complete = shtab.DIRECTORY
        elif action.metavar is not None and "FILE" in action.metavar:
            action.complete = shtab.FILE
    configs = " ".join(list_configs())
    words = f'compgen -W "{configs}" -- "$1"; compgen -f -X "!*.y*ml" -- "$1"'
    preamble: object = {"bash": f"_flower_graph_configs() {{ {words}; }}"}
    say(shtab.complete(parser, shell=args.shell, preamble=preamble))
    return 0


# Any: argparse's actions, at which shtab looks for an attribute of its own
def _actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
        else:
            yield action
