"""``python -m flower_graph``: the command ``flower-graph``."""

import sys
from importlib import import_module

if __name__ == "__main__":
    # By name, as an entry point is: the command stands above the library
    sys.exit(import_module("flower_graph.apps.cli.main").main())
