"""The secure sum: a round, one client of many, and whole sums with clients that vanish.

python -m benchmarks.sums [--quick]
"""

from __future__ import annotations

import json
import sys

from benchmarks.secure import round_table
from benchmarks.secure_clients import client_table
from benchmarks.secure_whole import whole_table


def main() -> None:
    """Print the tables as JSON."""
    quick = "--quick" in sys.argv
    print(json.dumps([make(quick) for make in (round_table, client_table, whole_table)]))


if __name__ == "__main__":
    main()
