"""The command ``flower-graph report``."""

from __future__ import annotations

import argparse

from flower_graph.errors import OutputError
from flower_graph.method.page import page
from flower_graph.storage.writing import named, replaced


def report_command(args: argparse.Namespace) -> int:
    """Write a page about runs."""
    if args.out.suffix not in (".html", ".htm"):
        raise OutputError(f"--out {args.out}: the page is HTML, so its name must end in .html")
    text = page(*args.runs)
    try:
        with replaced(named(args.out)) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise OutputError(f"--out {args.out}: cannot be written ({error})") from error
    print(f"written to {args.out}", flush=True)
    return 0
