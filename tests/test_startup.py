"""What each command imports before it is done, and what deployed clients of each method import.

Each line was a second or more of every start. Ratios are measured by ``benchmarks/start.py``.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from federation import tried

from flower_graph.apps.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
# What takes longer to import than the commands take
HEAVY = {
    *("flwr", "gensim", "igraph", "matplotlib", "mpmath", "nacl", "networkx", "numba", "numpy"),
    *("pandas", "ray", "requests", "scipy", "sklearn", "sympy", "torch", "torch._dynamo"),
    "torch_geometric",
}
# The method's own YAML, and what it needs besides Flower and PyTorch
CLIENTS = {
    "nfedgnn": ("model: {hidden: 4}\n", {"nacl"}),  # for sums under masks
    "fedscem": ("partition: {clients: 3, min_nodes: 6}\n", {"nacl"}),
    "fedgls": ("partition: {clients: 3, method: random}\n", set[str]()),
    "ppfl": (
        "judge: {folds: 2, mlp: false}\nmodel: {name: gat}\n"
        "partition: {clients: 3, private_share: 0.2}\n",
        {"nacl", *("mpmath", "pandas", "scipy", "sklearn", "sympy")},  # by scikit-learn
    ),
}
DATA = (
    "data: {name: csbm, nodes: 60, classes: 2, degree: 6, num_features: 20, active: 5,"
    " split: random, ratios: [0.4, 0.3, 0.3]}\n"
)
ROUND = """
from pathlib import Path
from flower_graph.apps.client_app import app
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of
from flower_graph.data.folders.party import server_folder
from flower_graph.simulation import InProcessGrid

config, data = load_config("mine.yaml"), Path("data").absolute()
own = [{"data-folder": str(folder)} for folder in sorted(data.glob("client*"))]
grid = InProcessGrid(app, num_supernodes=len(own), node_config=own)
for context in grid.contexts.values():
    context.run_config = {"config": "mine.yaml"}
server = server_folder(config, str(data / "server"))
strategy = method_of(config).build_strategy(config, None, server)
strategy.start(grid, num_rounds=1)
"""


def imported(code: str, folder: Path) -> set[str]:
    """Return which heavy modules a fresh interpreter then has."""
    last = f"\nimport sys\nprint('\\nhas', *({HEAVY!r} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code + last],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.rpartition("\nhas")[2].split())


def command(*words: str) -> str:
    return f"""
import sys
from flower_graph.apps.cli.main import main
try:
    main({list(words)!r})
except SystemExit:
    pass
"""


LOADS = "import flower_graph.flower_compat; from flower_graph import load_config"


@pytest.mark.parametrize(("code", "allowed"), [("import flower_graph", set()), (LOADS, {"numpy"})])
def test_a_short_name_imports_what_it_needs(code: str, allowed: set[str], tmp_path: Path) -> None:
    assert imported(code, tmp_path) <= allowed


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["--help"], set()),
        (["list"], set()),
        (["identity", "new", "key"], {"nacl", "numpy"}),
        (["show", "quickstart"], set()),
        (["show", "fedgls/cora", "graph.taw=1"], set()),
        (["run", "quickstart", "strategy.reg_wieght=1"], {"numpy"}),
        pytest.param(["compare", "."], {"numpy", "scipy", "torch"}, marks=pytest.mark.slow),
        pytest.param(
            ["run", "quickstart", "rounds=1"],
            {"flwr", "nacl", "numpy", "pandas", "torch"},  # pandas for the tables that it leaves
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda words: " ".join(sorted(words) if isinstance(words, set) else words),
)
def test_commands_import_what_they_need(
    words: list[str], allowed: set[str], tmp_path: Path
) -> None:
    assert imported(command(*words), tmp_path) <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("app", tried(CLIENTS))
def test_a_round_from_data_folders_imports_what_the_method_needs(app: str, tmp_path: Path) -> None:
    """Server and clients in one process, so that each alone imports no more."""
    own, allowed = CLIENTS[app]
    (tmp_path / "mine.yaml").write_text(f"app: {app}\n{DATA}{own}", encoding="utf-8")
    data = str(tmp_path / "data")
    assert main(["partition", str(tmp_path / "mine.yaml"), "--out", data]) == 0
    assert imported(ROUND, tmp_path) <= {"flwr", "numpy", "torch"} | allowed


def test_a_system_without_locks_of_files_is_refused_in_a_line_that_says_what_will_do() -> None:
    code = (
        "import importlib.util as util; real = util.find_spec\n"
        "util.find_spec = lambda name: None if name == 'fcntl' else real(name)\n"
        "import flower_graph"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("ImportError: ")
    assert "Linux" in done.stderr.splitlines()[-1]
