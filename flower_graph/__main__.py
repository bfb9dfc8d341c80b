"""``python -m flower_graph``: the command ``flower-graph``."""

import sys

from flower_graph.apps.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
