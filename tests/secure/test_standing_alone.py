"""The secure sum and the alignment work with every other folder of the library barred."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BARRED = """
import sys
ALLOWED = {"secure", "wire", "storage", "errors", "lazy", "flower_compat"}
BESIDES = tuple(sys.argv[2:])

class Bar:
    def find_spec(self, name, path=None, target=None):
        package, _, rest = name.partition(".")
        if package == "flower_graph" and rest and rest.split(".")[0] not in ALLOWED:
            raise ImportError(f"barred: {name}")
        if name.startswith(BESIDES):
            raise ImportError(f"barred: {name}")

sys.meta_path.insert(0, Bar())
"""
EVERYTHING = """
import importlib, pkgutil
import flower_graph.secure
for module in pkgutil.walk_packages(flower_graph.secure.__path__, "flower_graph.secure."):
    importlib.import_module(module.name)
"""
SUM = """
from sum_helpers import World
world = World.make(12, per_host=2)
world.check(world.round(0), range(12))
"""
ALIGNMENT = """
from align_helpers import DATA, FORMS, Alignment
for form in FORMS:
    alignment = Alignment(DATA, [[0, 2], [5]], form=form)
    alignment.align()
    assert alignment.agree([0, 2, 5])
"""
PARTIES = """
import tempfile
from pathlib import Path
from party_helpers import PartyWorld
world = PartyWorld.make(7, Path(tempfile.mkdtemp(dir=sys.argv[1])))
world.begin()
world.check(world.round(0), range(7))
"""


def run(code: str, folder: Path, *besides: str) -> subprocess.CompletedProcess[str]:
    """Run code with everything but what ``secure/`` stands on barred, and more ``besides``."""
    helpers = f"sys.path.insert(0, {str(HERE)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", BARRED + helpers + code, str(folder), *besides],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )


def test_secure_works_on_the_wire_storage_and_errors_alone(tmp_path: Path) -> None:
    done = run(SUM + ALIGNMENT + PARTIES + EVERYTHING, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_server_that_is_trusted_needs_nothing_of_parties(tmp_path: Path) -> None:
    done = run(
        "import flower_graph.secure.sum.service\n" + SUM + ALIGNMENT,
        tmp_path,
        "flower_graph.secure.parties",
    )
    assert done.returncode == 0, done.stderr


def test_the_bar_is_closed(tmp_path: Path) -> None:
    done = run("import flower_graph.server", tmp_path)
    assert done.returncode != 0 and "barred: flower_graph.server" in done.stderr
    done = run(PARTIES, tmp_path, "flower_graph.secure.parties")
    assert done.returncode != 0 and "barred: flower_graph.secure.parties" in done.stderr
