"""What it costs to leave predictions, models and figures of clients: runs with and without.

    python -m benchmarks.outputs_cost nfedgnn/cora fedscem/cora

Seconds are the process's own, so that others on the machine count less; runs take turns.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path

from flower_graph.apps.run import run
from flower_graph.method.load import load_config

FORMS = {"none": ["save=none"], "all": ["save=all"], "best": ["save=all", "keep=best"]}


def measure(name: str, settings: list[str]) -> tuple[float, int]:
    """Run a config once; return the seconds of the processor and the bytes of the folder."""
    config = load_config(name, [*settings, "device=cpu"])
    with tempfile.TemporaryDirectory() as folder:
        started, out = time.process_time(), Path(folder) / "run"
        run(config, out)
        seconds = time.process_time() - started
        return seconds, sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def main() -> None:
    """Print a line for each config and form, in seconds over the run that keeps nothing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("configs", nargs="+", metavar="CONFIG")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    for name in args.configs:
        rounds = f"rounds={args.rounds}"
        measure(name, ["rounds=1", "save=all"])  # what libraries and data load once
        found: dict[str, list[tuple[float, int]]] = {form: [] for form in FORMS}
        for _ in range(args.repeats):
            for form, settings in FORMS.items():
                found[form].append(measure(name, [rounds, *settings]))
        least = {form: min(seconds for seconds, _ in runs) for form, runs in found.items()}
        for form, seconds in least.items():
            more, size = seconds - least["none"], found[form][0][1]
            share = 100 * more / least["none"]
            print(
                f"{name}, {args.rounds} rounds, {form}: {seconds:.2f} s, {more:+.2f} s "
                f"({share:+.1f} %), {size:,} bytes",
                flush=True,
            )


if __name__ == "__main__":
    main()
