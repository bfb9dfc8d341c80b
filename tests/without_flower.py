"""A process without Flower and Ray."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN = """
import sys
sys.modules["flwr"] = sys.modules["ray"] = None  # an import of them fails
"""


def run_without_flower(code: str, *arguments: Path) -> str:
    """Run code in such a process; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
