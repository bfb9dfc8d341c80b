"""The commands ``flower-graph compare`` and ``report``: finished runs beside each other."""

import argparse
import sys

from flower_graph.apps.cli.say import hand_over, say
from flower_graph.errors import OutputError
from flower_graph.method.compare import compare
from flower_graph.storage.files import named, replaced, saying


def compare_command(args: argparse.Namespace) -> int:
    """Print runs beside each other, and name runs that are left out."""
    compared = compare(*args.runs, by=args.by)
    for reason in compared.left_out:
        say(f"left out: {reason}", to=sys.stderr)
    if args.json or args.csv:
        hand_over(f"{compared.to_json()}\n" if args.json else compared.to_csv())
    else:
        say(compared.to_text(all_settings=args.all_settings))
    if args.picture is not None:
        compared.save_picture(args.picture)
    return 0


def report_command(args: argparse.Namespace) -> int:
    """Write a page about runs."""
    if args.out.suffix not in (".html", ".htm"):
        raise OutputError(f"--out {args.out}: the page is HTML, so its name must end in .html")
    from flower_graph.method.page import page  # loads matplotlib

    text, out = page(*args.runs), named(args.out)
    with saying(out), replaced(out) as stream:
        stream.write(text.encode())
    say(f"written to {args.out}")
    return 0
