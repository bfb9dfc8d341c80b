"""The secure sum and the alignment load with every other folder of the library barred."""

from __future__ import annotations

import subprocess
import sys

import pytest

BARRED = """
import importlib, pkgutil, sys
ALLOWED = {"secure", "wire", "storage", "errors", "lazy", "flower_compat"}

class Bar:
    def find_spec(self, name, path=None, target=None):
        package, _, rest = name.partition(".")
        barred = package == "flower_graph" and rest and rest.split(".")[0] not in ALLOWED
        if barred or name.startswith(tuple(sys.argv[2:])):
            raise ImportError(f"barred: {name}")

sys.meta_path.insert(0, Bar())
package = importlib.import_module("flower_graph." + sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
"""
PARTIES = "flower_graph.secure.parties"


@pytest.mark.parametrize(
    ("loaded", "besides", "barred"),
    [
        ("secure", "-", ""),
        ("secure.align", PARTIES, ""),  # one that proves nothing needs nothing of parties
        # The bar is closed.
        ("server", "-", "flower_graph.server"),
        ("secure", PARTIES, PARTIES),
    ],
)
def test_secure_loads_on_the_wire_storage_and_errors_alone(loaded, besides, barred) -> None:
    command = [sys.executable, "-c", BARRED, loaded, besides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not barred), done.stderr
    assert not barred or f"barred: {barred}" in done.stderr
