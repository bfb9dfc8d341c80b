"""The command ``flower-graph compare``."""

from __future__ import annotations

import argparse
import sys

from flower_graph.apps.cli.say import say
from flower_graph.method.compare import compare


def compare_command(args: argparse.Namespace) -> int:
    """Print runs beside each other, and name runs that are left out."""
    compared = compare(*args.runs, by=args.by)
    for reason in compared.left_out:
        say(f"left out: {reason}", to=sys.stderr)
    if args.json:
        print(compared.to_json())
    elif args.csv:
        print(compared.to_csv(), end="")
    else:
        print(compared.to_text(all_settings=args.all_settings))
    if args.picture is not None:
        compared.save_picture(args.picture)
    return 0
