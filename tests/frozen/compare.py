"""Compare what runs give with what is frozen in ``frozen.json.xz``, or with another checkout.

    python tests/frozen/compare.py [--against CHECKOUT] [--write] [--only REGEX]

All runs of a tree (``runs.py``) are done in one child process, which enters the project only by
its command line, so that it works on both sides of a refactoring. Against the file, floats may
differ by 1e-5 and hashes are left out, because other processors round otherwise; runs in which
rounding decides more (``runs.DECIDED_BY_ROUNDING``) are held loosely. Against a checkout everything
is compared to the bit. ``--write`` replaces runs of the same names.
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import lzma
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from runs import DECIDED_BY_ROUNDING, Run, in_process

TREE = Path(__file__).resolve().parents[2]
FILE = Path(__file__).resolve().with_name("frozen.json.xz")
TOLERANCE = 1e-5
LOOSELY = 0.1  # for runs that rounding sends another way: five times what has been seen
CHOSEN = re.compile(r"best|beats-chance")  # figures of a round, or a word, that a small one decides
# What another time, machine or folder changes
UNSTABLE = re.compile(r"seconds|time|memory|version|^(parts|config|path|out|folder|run|command)$")
ENVIRONMENT = {"PYTHONHASHSEED": "0", "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _any_number(key: str) -> str:
    return re.sub(r"\d+", "#", key)


def child(names: Sequence[str], out: Path) -> None:
    """Do runs in the tree that ``PYTHONPATH`` names, and write what they gave."""
    tree = Path(os.environ["PYTHONPATH"])
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["flower-graph"].partition(":")
    found = importlib.import_module(module)
    assert Path(found.__file__ or "").resolve().is_relative_to(tree.resolve()), found.__file__
    given = dict[str, Any]()
    _settle()
    for run in in_process():
        if run.name in names:
            with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
                main = getattr(found, function)
                given[run.name] = _give(run, main, Path(folder) / "out")
    out.write_text(json.dumps(given))


def _settle() -> None:
    """Draw noise from one seed; save pictures as empty files, which is fast."""
    import numpy as np
    import torch
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    torch.set_num_threads(1)
    seed = np.random.seed
    # Noise of differential privacy is drawn after NumPy got whole arrays of the system's entropy.
    np.random.seed = lambda value=None: seed(0 if np.size(value) > 1 else value)
    FigureCanvasAgg.print_png = lambda *_, **__: None


def _give(run: Run, main: Any, out: Path) -> dict[str, Any]:
    words = run.words() + (["--out", str(out)] if run.command != "show" else [])
    code, said = _call(main, words)
    given: dict[str, Any] = {}
    if run.again and code == 0:
        given["checkpoint"] = _lose_the_last(out)
        resume = ["run", "--resume", str(out), "--supernodes", str(run.supernodes)]
        code, said = _call(main, resume)
    given["exit"] = code
    if code != 0:
        print(f"{run.name}: exit {code}\n{said}", file=sys.stderr)
        # Its last line is what a user reads; folders are others each time.
        given["error"] = re.sub(r"/\S*/", "", said.strip().splitlines()[-1])
    if run.command == "show":
        given["text"] = said.splitlines()
    return {**given, **_written(out)}


def _call(main: Any, words: list[str]) -> tuple[Any, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
        except Exception:
            traceback.print_exc()
            status = "exception"
    return status or 0, said.getvalue()


def _lose_the_last(out: Path) -> dict[str, Any]:
    """Make a run one that was stopped after its last but one checkpoint; give what that holds."""
    folders = sorted(out.rglob("round-*"), key=lambda path: int(path.name.split("-")[1]))
    shutil.rmtree(folders[-1])
    (out / "result.json").unlink()
    files = (file for file in folders[-2].rglob("*") if file.is_file())
    return {"rounds": [folder.name for folder in folders], "files": _counted(f.name for f in files)}


def _counted(names: Iterable[str]) -> Counter[str]:
    return Counter(map(_any_number, names))


def _written(out: Path) -> dict[str, Any]:
    files = sorted(path for path in out.rglob("*") if path.is_file())
    given: dict[str, Any] = {"files": _counted(str(path.relative_to(out)) for path in files)}
    clients = hashlib.sha256()
    for path in files:
        name = str(path.relative_to(out))
        summary = None if "checkpoints" in path.parts else _summary(path)
        if re.match(r"client-(?!0+/)", name):  # the first client's stand for all
            clients.update(json.dumps([name, summary]).encode())
        elif summary is not None:
            given[name] = summary
    return {**given, "clients-sha256": clients.hexdigest()}


def _summary(path: Path) -> dict[str, Any] | None:
    if path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        return _columns([_stable(json.loads(line)) for line in lines])
    if path.suffix == ".json":
        figures: dict[str, Any] = _stable(json.loads(path.read_text()))
        return figures
    return _tensors(path) if path.suffix == ".safetensors" else None


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stable(one) for key, one in value.items() if not UNSTABLE.search(key)}
    return [_stable(one) for one in value] if isinstance(value, list) else value


def _columns(rounds: list[dict[str, Any]]) -> dict[str, list[Any]]:
    flat = [dict(_leaves(one)) for one in rounds]
    keys = dict.fromkeys(k for one in flat for k, v in one.items() if v not in ("", [], {}))
    return {key: [one.get(key, "absent") for one in flat] for key in keys}


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, one in value.items():
        if isinstance(one, dict) and one:
            yield from _leaves(one, f"{prefix}{key}/")
        else:
            yield prefix + key, one


def _tensors(path: Path) -> dict[str, Any]:
    import numpy as np
    from safetensors.numpy import load_file

    arrays = dict(sorted(load_file(path).items()))
    digest, squares = hashlib.sha256(), 0.0
    kinds: Counter[str] = Counter()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        squares += float(np.square(array.astype(np.float64)).sum())
        kinds[f"{_any_number(name)} {array.dtype} {array.ndim}d"] += array.size
    return {"numbers": dict(kinds), "norm": math.sqrt(squares), "sha256": digest.hexdigest()}


def collect(tree: Path, runs: Sequence[Run]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
        out = Path(folder) / "given.json"
        names = "\n".join(run.name for run in runs)
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tree)}
        command = [sys.executable, __file__, "--child", str(out)]
        subprocess.run(command, input=names, text=True, check=True, cwd=folder, env=environment)
        given: dict[str, Any] = json.loads(out.read_text())
    return given


def differences(old: Any, new: Any, *, tolerance: float, place: str = "") -> Iterator[str]:
    """Name what differs, by run, file or part, key, and round in brackets; 0: to the bit."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            one = f"{place} {key}".strip()
            if key not in old or key not in new:
                yield f"{one}: {'appeared' if key in new else 'is gone'}"
            else:
                yield from differences(old[key], new[key], tolerance=tolerance, place=one)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (before, after) in enumerate(zip(old, new, strict=True), start=1):
            there = f"{place} [{number}]"
            yield from differences(before, after, tolerance=tolerance, place=there)
    elif tolerance == LOOSELY and CHOSEN.search(place):
        return
    elif tolerance and {type(old), type(new)} in ({float}, {float, int}):
        if not math.isclose(old, new, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{place}: {old!r} -> {new!r}"
    elif type(old) is not type(new) or old != new:
        yield f"{place}: {old!r} -> {new!r}"


def write(given: dict[str, Any]) -> None:
    """Put runs into the file, in the place of those of the same names; drop runs that are gone."""
    known, frozen = [run.name for run in in_process()], {**read(), **given}
    frozen = {name: frozen[name] for name in known if name in frozen}
    FILE.write_bytes(lzma.compress(json.dumps(_for_file(frozen)).encode()))


def read() -> dict[str, Any]:
    frozen: dict[str, Any] = json.loads(lzma.decompress(FILE.read_bytes()))
    return frozen


def _for_file(value: Any) -> Any:
    if isinstance(value, dict):  # SHA-256s are compared to the bit or not at all
        is_hash = re.compile("[0-9a-f]{64}").fullmatch
        kept = {k: v for k, v in value.items() if not (isinstance(v, str) and is_hash(v))}
        return {key: _for_file(one) for key, one in kept.items()}
    if isinstance(value, list):
        return [_for_file(one) for one in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def compare(runs: Sequence[Run], *, against: Path | None = None, tree: Path = TREE) -> list[str]:
    """Do runs, here and perhaps in another checkout; say what differs, one line each."""
    new = collect(tree, runs)
    if against is not None:
        return list(differences(collect(against.resolve(), runs), new, tolerance=0))
    frozen, new, found = read(), _for_file(new), list[str]()
    for run in runs:
        name, tolerance = run.name, LOOSELY if DECIDED_BY_ROUNDING.search(run.name) else TOLERANCE
        found += differences(frozen.get(name, {}), new[name], tolerance=tolerance, place=name)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, help="another checkout, compared to the bit")
    parser.add_argument("--write", action="store_true", help="freeze anew")
    parser.add_argument(
        "--only", default="", help="runs whose name has this (a regular expression)"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child is not None:
        child(sys.stdin.read().splitlines(), args.child)
        return 0
    runs = [run for run in in_process() if re.search(args.only, run.name)]
    if args.write:
        write(collect(TREE, runs))
        print(f"{len(runs)} runs frozen")
        return 0
    found = compare(runs, against=args.against)
    for line in found:
        print(line)
    print(f"{len(found)} differences in {len(runs)} runs" if found else "nothing changed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
