"""Files that are damaged or made to do harm, and all that read files; run by itself, in bounds.

``python tests/hostile/hostile_files.py --count 3000`` spoils files of a run, of a SuperNode and of
users so many times, and writes which readers did not end in one of our errors, the most memory
that they took and the longest that one took.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import resource
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bombs import made_by_hand
from honest_files import NAMED, Target, make_all
from spoiled_files import spoiled

LONGEST, HANGS = 20, 300  # seconds for a file: of the processor, and until it counts as hung
MEMORY = 1 << 30  # bytes beside what the process has before it reads


def attempt(target: Target, lay: Callable[[Path], Any]) -> tuple[str, float]:
    """Lay a file in the place of another, and read it: nothing, or the error that is not ours."""
    honest, mode = target.path.read_bytes(), target.path.stat().st_mode
    target.path.unlink()
    started = time.process_time()
    try:
        lay(target.path)
        if target.path.is_file() and not target.path.is_symlink():
            target.path.chmod(mode)
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, LONGEST)
        signal.alarm(HANGS)
        target.read()
        said = ""
    except NAMED:
        said = ""
    except BaseException as error:
        said = f"{type(error).__name__}: {error!s:.200}"
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        took = time.process_time() - started
        if target.path.is_dir() and not target.path.is_symlink():
            target.path.rmdir()
        target.path.unlink(missing_ok=True)
        target.path.write_bytes(honest)
        target.path.chmod(mode)
    return said, took


class TooLongError(BaseException):
    """Ends what hangs; no reader takes it for what a file brought about."""


def too_long(*_: Any) -> None:
    """End what hangs."""
    raise TooLongError(f"more than {LONGEST} s")


def highest(*, anew: bool = False) -> int:
    """Return the most bytes that the process has had in memory, or has now."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def try_all(count: int, seed: int, by_hand: int) -> dict[str, Any]:
    """Try so many files that are spoiled at random, and every so many-th of those made by hand."""
    for one in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(one, too_long)
    rng, bad, slowest, tried = random.Random(seed), list[str](), 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        targets = make_all(Path(name))
        for target in targets:
            target.read()  # as it was written, and so that all is imported
        work = [one for k, one in enumerate(made_by_hand(targets)) if k % by_hand == 0]
        for number in range(count):
            target = targets[number % len(targets)]
            data = spoiled(target.path, target.path.read_bytes(), rng)
            work.append(
                (f"spoiled {number}", target, lambda path, data=data: path.write_bytes(data))
            )
        before = highest(anew=True)
        # So that a reader that is wrong does no harm to the machine
        room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (room + 3 * MEMORY,) * 2)
        for what, target, lay in work:
            said, took = attempt(target, lay)
            tried, slowest = tried + 1, max(slowest, took)
            used = highest() - before
            where = target.path.relative_to(name)
            if said:
                bad.append(f"{where}, {what}: {said}")
            if used > MEMORY:
                bad.append(f"{where}, {what}: {used >> 20} MiB")
                break
    return {"tried": tried, "bad": bad, "bytes": used, "seconds": slowest}


def main() -> None:
    """Try files, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--by-hand", type=int, default=1)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    print(json.dumps(try_all(given.count, given.seed, given.by_hand)))


if __name__ == "__main__":
    main()
