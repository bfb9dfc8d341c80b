"""Files that are damaged or made to do harm, and all that read files; tried in bounds."""

import io
import json
import logging
import os
import random
import re
import resource
import signal
import struct
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from hostile_grid import Called
from run_folders import GRAPH, make_run
from safetensors.torch import load, save
from sum_helpers import write_keys

from flower_graph import errors
from flower_graph.apps.cli.run import Job
from flower_graph.apps.cli.run import _done as done
from flower_graph.client.adaptor import read_state, write_state
from flower_graph.data.folders.party import CLIENTS, RunFolder, open_folder, write_folder
from flower_graph.data.sources.datasets import load_file
from flower_graph.errors import StateLostError
from flower_graph.method.load import load_config
from flower_graph.method.run import load_run
from flower_graph.outputs.client import CLIENTS as CLIENTS_TABLE
from flower_graph.outputs.client import CURVES, IN_RUN, FigureLog, merge_clients, write_figures
from flower_graph.outputs.files import Embeddings, SavedModels, Snapshot, SparseRows, read_models
from flower_graph.records.rounds import RoundReport, read_reports
from flower_graph.secure.parties.journal import Journal, sealed
from flower_graph.secure.parties.registry import Identity, Registry, read_public
from flower_graph.storage import checkpoint
from flower_graph.storage.reading import reading
from flower_graph.storage.sealed import StateKey

NAMED = tuple(
    one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception)
)
RUN = "0123456789abcdef" * 2
SETTINGS = {"app": "fedgls", "seed": 0}
MODULE = "flower_graph.models.GCN"
SIZES = {"features": 3, "hidden": 4, "classes": 2}


class Target(NamedTuple):
    """A file, and what reads it."""

    path: Path
    read: Callable[[], Any]


def use_run(folder: Path) -> None:
    run = load_run(folder)
    for look in (
        lambda: run.predictions().of_client(0).of_role("train").accuracy(),
        lambda: repr(run.predictions()),
        lambda: run.kept_rounds,
        lambda: run.model(0),
        lambda: run.predict(**GRAPH, client=0),
        lambda: repr(run.metrics),
        lambda: read_reports(folder / "metrics.jsonl"),
        lambda: (run.seeds, run.result),
    ):
        with suppress(*NAMED):
            look()


def use_models(folder: Path) -> None:
    for one in read_models(folder):
        for client in one.clients:
            one.state_dict(client)


def use_state(file: Path) -> None:
    """Read a SuperNode's state as it does when it starts."""
    with reading(file, StateLostError):
        read_state(file)


def of_models(folder: Path) -> Iterator[Target]:
    shared = {"lin.weight": torch.ones(4, 3), "lin.bias": torch.ones(4)}
    places = torch.tensor([0, 2, 1]), torch.tensor([0, 2, 3])
    rows = SparseRows("lin.weight", torch.ones(3, 4), *places, True)
    models = [
        SavedModels(MODULE, SIZES, [0, 1], shared, {"own": torch.ones(2, 5)}, rows),
        SavedModels(MODULE, SIZES, [2, 3, 4], {}, {"own": torch.ones(3, 2)}),
    ]
    number = np.arange(4)
    beside = Embeddings(number, number, number, number > 1, np.ones((4, 3), np.float32))
    Snapshot(None, models, beside).write(folder)
    for end in ("json", "safetensors"):
        yield Target(folder / f"models.{end}", lambda: use_models(folder))
    yield Target(folder / "embeddings.npz", lambda: Embeddings.read(folder))


def of_graphs(folder: Path) -> Iterator[Target]:
    folder.mkdir()
    edges, y = torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.tensor([0, 1, 0, 1])
    masks = {f"{part}_mask": y == 0 for part in ("train", "val", "test")}
    graph = {"x": torch.rand(4, 3), "edge_index": edges, "y": y, "names": tuple("abcd")}
    torch.save(graph | {"x": torch.eye(4).to_sparse()}, folder / "g.pt")
    torch.save(graph | masks, folder / "old.pt", _use_new_zipfile_serialization=False)
    nodes = [{"id": one, "label": "u" if k % 2 else "v", "age": k, "list": [1, k]}
             for k, one in enumerate("abcd")]  # fmt: skip
    links = [{"source": "a", "target": "b"}, {"source": "b", "target": "d"}]
    (folder / "g.json").write_text(json.dumps({"nodes": nodes, "links": links}))
    head = '<graphml><key id="k" for="node" attr.name="label"/><key id="v" for="node" attr.name='
    body = "".join(f'<node id="{one}"><data key="k">{one}</data><data key="v">1</data></node>'
                   for one in "abcd")  # fmt: skip
    tail = '<edge source="a" target="b"/></graph></graphml>'
    (folder / "g.graphml").write_text(f'{head}"age"/><graph>{body}{tail}')
    for name in ("g.pt", "old.pt", "g.json", "g.graphml"):
        yield Target(folder / name, lambda file=folder / name: load_file(file))  # type: ignore[misc]
    tables = folder / "tables"
    tables.mkdir()
    rows = "name,label,age\na,u,1\nb,u,1\nc,u,1\nd,u,1\n"
    for name, text in (("nodes", rows), ("edges", "source,target\na,b\nb,c\n")):
        (tables / f"{name}.csv").write_text(text)
        yield Target(tables / f"{name}.csv", lambda: load_file(tables))


def make_all(place: Path) -> Iterator[Target]:
    """Write honest files of every kind; give them with their readers."""
    run = make_run(place / "run")
    report = RoundReport(1, 0.5, 0.5, 0.0, 1.0, 1.0, 1.0, 2, 2).to_record()
    (run / "metrics.jsonl").write_text(f"{json.dumps(report)}\n" * 3)
    (run / "clients" / "0" / "outputs.json").write_text('{"round": 3}')
    for one in sorted(run.rglob("*")):
        if one.is_file() and one.suffix != ".csv" and "1" not in one.parts:
            yield Target(one, lambda: use_run(run))
    yield from of_models(place / "several")
    yield from of_graphs(place / "graphs")
    yield from of_figures(place)
    yield from of_parties(place)
    yield from of_supernode(place)


def of_figures(place: Path) -> Iterator[Target]:
    out, log = place / "simulated", FigureLog(place / "figures")
    for number in range(3):
        log.add(number, [0, 1], [4, 5], [0.5, 0.25], *np.eye(3, 2), 0, 0)
    tables = out / IN_RUN / "0"
    tables.mkdir(parents=True)
    write_figures(tables, log.read(), {"last": 2, "best": 1}, 1)
    job = Job("fedgls", [], load_config("quickstart"), out)
    (out / "result.json").write_text('{"config": {"rounds": 3}}')
    yield Target(place / "figures", lambda: FigureLog(place / "figures").read(2))
    for name in (CLIENTS_TABLE, CURVES):
        yield Target(tables / name, lambda: merge_clients(out))
    yield Target(out / "result.json", lambda: done(job))


def of_parties(place: Path) -> Iterator[Target]:
    file, key = place / "registry.json", place / "party-0"
    write_keys(5, place)
    registry, journal, public = Registry.read(file), place / "own.journal", key.with_suffix(".pub")
    kept = Journal(journal, b"a run")
    kept.contribute(3, b"steps")
    yield Target(file, lambda: Registry.read(file))
    yield Target(key, lambda: Identity.read(key, registry))
    yield Target(public, lambda: read_public(public))
    yield Target(journal, lambda: kept.last(b"steps"))


def of_supernode(place: Path) -> Iterator[Target]:
    saved, folder = place / "checkpoints", place / "client-0003"
    client = checkpoint.round_folder(saved, 1) / "client-0.safetensors"
    checkpoint.save_client(client, {"a": torch.arange(6.0), "b": torch.tensor(2)}, RUN)
    yield Target(client, lambda: checkpoint.load_client(client, RUN))
    state = {"w": torch.arange(40.0), "clients": [1, 2, 3], "known": {"up": {"a": 1}}}
    checkpoint.save_server(saved, 1, state)
    server = client.with_name("server.safetensors")
    yield Target(server, lambda: checkpoint.load_server(saved, 1))
    write_folder(folder, RunFolder(CLIENTS, SETTINGS, [3], 5, 4, 2, {}, {"3.y": torch.arange(4)}))
    for name in ("manifest.json", "data.safetensors"):
        yield Target(folder / name, lambda: open_folder(folder, SETTINGS, CLIENTS))
    context = place / "state" / "run-1" / "context-0.state"
    write_state(context, RecordDict({"a": ConfigRecord({"b": [1, 2]})}))
    yield Target(context, lambda: use_state(context))
    secret, given = place / "secret", {"state-key": str(place / "secret")}
    secret.write_text("a passphrase of ours")
    secret.chmod(0o600)
    yield Target(secret, lambda: StateKey.of(given, place))
    (place / "mine.yaml").write_text("app: fedgls\nrounds: 3\ndata: {name: cora-linqs}\n")
    yield Target(place / "mine.yaml", lambda: load_config(str(place / "mine.yaml")))


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 41)


PLACED: dict[str, Callable[[Path], Any]] = {
    "a pipe that nobody writes to": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path),
    "a device that never ends": lambda path: path.symlink_to("/dev/zero"),
    "two million million bytes, which are nowhere": huge,
}


def unfolding_arrays() -> Iterator[bytes]:
    out = io.BytesIO()  # a thousand megabytes of zeros
    with (
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("client.npy", "w") as member,
    ):
        member.write(npy("|i1", f"({1000 << 20},)")[:-64])
        for _ in range(1000):
            member.write(bytes(1 << 20))
    yield out.getvalue()
    for shape in ("(10000000000000,)", "(-1, -8)", "(4611686018427387904, 4)", "(" * 99):
        yield packed({"client.npy": npy("<i8", shape)})
    for kind in ("|O", "<U0", "|V0", "<U1000000000"):
        yield packed({"client.npy": npy(kind, "(1000000000,)")})
    yield packed({f"{number}.npy": b"" for number in range(20_000)})


def npy(kind: str, shape: str) -> bytes:
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + bytes(64)


def packed(members: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how, compresslevel=1) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def saved(value: Any, zipped: bool = True) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=zipped)
    return out.getvalue()


def unfolding_saved() -> Iterator[bytes]:
    """Give what ``torch.save`` writes of tensors that repeat a number, and of calls."""
    nested: Any = ["a"]
    for _ in range(60):
        nested = [nested, nested]
    one = torch.ones(1)
    values = [one.expand(10**10), Called(torch.FloatTensor, 10**10), Called(bytearray, 10**11)]
    values += [nested, one.expand(10**9).to("meta"), Called(os.system, "true")]
    for value in values:
        for zipped in (True, False):
            yield saved({"x": value, "y": value}, zipped)
    yield b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b"."
    # Archives whose pickle says that a tensor is larger than its member
    with zipfile.ZipFile(io.BytesIO(saved({"x": torch.ones(10, 10)}))) as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    name = next(one for one in members if one.endswith("data.pkl"))
    for count in (101, 10**9, -1):
        wider = members[name].replace(b"Kd", b"J" + struct.pack("<i", min(count, 2**31 - 1)))
        yield packed(members | {name: wider}, zipfile.ZIP_STORED)


def unfolding_tensors() -> Iterator[bytes]:
    yield struct.pack("<Q", 2**62) + b"{}"
    for kind, shape in (("F32", [2**40]), ("F8_E4M3", [4]), ("F32", [-1]), ("F32", [2**62, 4])):
        entry = {"a": {"dtype": kind, "shape": shape, "data_offsets": [0, 4]}}
        yield head_of(entry) + bytes(4)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    yield head_of({str(number): empty for number in range(50_000)})


def head_of(entries: dict[str, Any]) -> bytes:
    data = json.dumps(entries).encode()
    return struct.pack("<Q", len(data)) + data


def unfolding_json() -> Iterator[bytes]:
    yield b"[" * 10**6
    yield b'{"round":' * 3000 + b"1" + b"}" * 3000
    for number in (b"9" * 5000, b"-" + b"9" * 4299, b"1e400", b"NaN"):
        yield b'{"round": ' + number + b', "nodes": ' + number + b"}"
        yield b'[{"clients": ' + number + b"}]"
    yield b'{"a": "\\ud800"}'


def impossible_models() -> Iterator[bytes]:
    for change in ({"hidden": 10**12}, {"hidden": 2**24, "features": 2**24}, {"hidden": 10**30}):
        said = {"module": MODULE, "arguments": SIZES | change, "client": 0}
        yield json.dumps(said).encode()
    rows = {"name": "lin.weight", "transposed": True}
    for clients in ([], [0, 0], ["0"], [0], [0, 1, 2], "01", None, [0, 10**30]):
        entry = {"module": MODULE, "arguments": {}, "clients": clients, "rows": rows}
        yield json.dumps([entry]).encode()


def unfolding_yaml() -> Iterator[bytes]:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for name, before in zip("bcdefghij", "abcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join(['*' + before] * 10)}]")
    yield "\n".join(lines).encode()
    yield b"a: &a [*a]"
    yield b"a: &a {b: 1, <<: *a}"
    yield b"[" * 20_000
    yield b"a: [" + b"x," * 60_000 + b"]"
    yield b"".join(b" " * depth + b"a:\n" for depth in range(600))
    yield b"rounds: " + b"9" * 5000


def unfolding_xml() -> Iterator[bytes]:
    pairs = zip("bcdefgh", "abcdefg", strict=True)
    entities = "".join(f'<!ENTITY {name} "' + f"&{before};" * 20 + '">' for name, before in pairs)
    dtd = f'<!DOCTYPE g [<!ENTITY a "xxxxxxxxxx">{entities}]>'
    yield f'<?xml version="1.0"?>{dtd}<graphml><node id="&h;"/></graphml>'.encode()
    yield b"<a>" * 100_000
    keys = "".join(f'<key id="{k}" for="node" attr.name="{k}"><default>1</default></key>'
                   for k in range(4000))  # fmt: skip
    nodes = '<node id="a"/>' * 20_000
    yield f"<graphml>{keys}{nodes}</graphml>".encode()


def unfolding_tables() -> Iterator[bytes]:
    yield b"name,label" + b"," * 20_000_000
    yield b'name,label\n"' + b"x" * 10**6
    yield b"name,label\n" + b'"\n",' * 6_000_000
    yield b"name,label\n" + "é".encode("latin-1")


BOMBS: dict[str, Callable[[], Iterator[bytes]]] = {
    ".npz": unfolding_arrays,
    ".pt": unfolding_saved,
    ".safetensors": unfolding_tensors,
    ".json": unfolding_json,
    ".jsonl": unfolding_json,
    ".yaml": unfolding_yaml,
    ".graphml": unfolding_xml,
    ".csv": unfolding_tables,
}
PLAIN = (b"", b"\0", b"\xff\xfe\0", b"\x80\x04\x95", b"PK\3\4" + bytes(100), b"[]", b"{}", b"0")


def made_by_hand(targets: list[Target]) -> Iterator[tuple[str, Target, Callable[[Path], Any]]]:
    """Give all that is made by hand for each file: a name, the file, and what lays it."""
    cache: dict[str, list[bytes]] = {}
    for target in targets:
        suffix = target.path.suffix
        if suffix not in cache:
            cache[suffix] = [*PLAIN, *(BOMBS[suffix]() if suffix in BOMBS else ())]
        more = [*impossible_models()] if target.path.name in ("model.json", "models.json") else []
        for what, lay in PLACED.items():
            yield what, target, lay
        for number, data in enumerate([*cache[suffix], *more]):
            yield f"{number}", target, lambda path, data=data: path.write_bytes(data)


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
    raise TooLongError(f"more than {LONGEST} s")


def highest() -> int:
    """Return the most bytes that the process has had in memory."""
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def try_all(count: int, by_hand: int, seed: int = 0) -> None:
    """Try so many files that are spoiled at random, and every so many-th of those made by hand.

    Only in a process of its own: it bounds the memory that the process may have.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    for one in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(one, too_long)
    rng, bad = random.Random(seed), list[str]()
    with tempfile.TemporaryDirectory() as name:
        targets = list(make_all(Path(name)))
        for target in targets:
            target.read()  # as it was written, and so that all is imported
        work = [one for k, one in enumerate(made_by_hand(targets)) if k % by_hand == 0]
        for number in range(count):
            target = targets[number % len(targets)]
            data = spoiled(target.path, target.path.read_bytes(), rng)
            work.append(
                (f"spoiled {number}", target, lambda path, data=data: path.write_bytes(data))
            )
        Path("/proc/self/clear_refs").write_text("5")  # from now on
        before = highest()
        # So that a reader that is wrong does no harm to the machine
        room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (room + 3 * MEMORY,) * 2)
        for what, target, lay in work:
            said, took = attempt(target, lay)
            used, where = highest() - before, target.path.relative_to(name)
            if said or took > LONGEST:
                bad.append(f"{where}, {what}: {said or took}")
            if used > MEMORY:
                bad.append(f"{where}, {what}: {used >> 20} MiB")
                break
    assert not bad, bad
    assert len(work) > count


ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**40, 0.5, 1e308, float("nan")),
    *("", "x", "\ud800", "x" * 100_000, "../../etc", "0-99,200", [], {}, [[]], [None], [1, 1]),
    *({"a": 1}, [[1, 2], [3]], [10**15] * 4),
)


def spoiled(path: Path, honest: bytes, rng: random.Random) -> bytes:
    """Change a file: its bytes anyhow, or what it says by the rules of its kind."""
    change = BY_KIND.get(path.suffix)
    if change is not None and rng.random() < 0.7:
        return change(honest, rng)
    start, size = rng.randrange(len(honest) + 1), rng.choice((1, 1, 4, 40))
    number = struct.pack("<i", rng.choice((-1, 0, 2**31 - 1, 65536)))
    put = rng.choice((rng.randbytes(size), b"", honest[:size] or b"\0", number))
    end = rng.choice((start, start + size, start + len(put), len(honest)))
    return honest[:start] + put + honest[end:]


def in_json(honest: bytes, rng: random.Random) -> bytes:
    tree = [json.loads(honest)]
    holder, key = rng.choice(list(places_in(tree)))
    if isinstance(holder, dict) and rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = rng.choice(ODD)
    return json.dumps(tree[0]).encode()


def places_in(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from places_in(tree[key])


def in_lines(honest: bytes, rng: random.Random) -> bytes:
    lines = honest.splitlines()
    place = rng.randrange(len(lines))
    lines[place] = in_json(lines[place], rng) if lines[place].endswith(b"}") else b"["
    return b"\n".join(lines) + b"\n"


def in_journal(honest: bytes, rng: random.Random) -> bytes:
    """Spoil the JSON behind the hash, and hash it anew as the party would."""
    return sealed(in_json(honest.partition(b"\n")[2], rng))


SIZES_OF_ODD = ((), (0,), (1,), (4,), (2, 2), (3, 4), (2, 6), (0, 2**20), (1000,))
KINDS = (torch.float32, torch.int64, torch.bool, torch.float16, torch.int8, torch.uint16,
         torch.float8_e4m3fn, torch.complex64)  # fmt: skip


def odd_tensor(rng: random.Random) -> torch.Tensor:
    made = torch.zeros(rng.choice(SIZES_OF_ODD), dtype=rng.choice(KINDS))
    if made.dtype in (torch.int64, torch.float32) and rng.random() < 0.5:
        made += rng.choice((-1, 7, 2**40))
    return made


def odd_array(rng: random.Random) -> Any:
    kind = rng.choice(("<i8", "<f4", "<f8", "|b1", "<U3", "|S2", "<c8", "<M8[s]", "|i1", "<u8"))
    with np.errstate(invalid="ignore"):
        return (np.zeros(rng.choice(SIZES_OF_ODD), "<i8") + rng.choice((-100, 0, 127))).astype(kind)


def in_parts(honest: bytes, rng: random.Random, read: Any, odd: Any, write: Any) -> bytes:
    """Put another part in the place of one, leave one out, or add one."""
    parts = dict(read(honest))
    name = rng.choice([*parts, "more"])
    parts[name] = odd(rng)
    if rng.random() < 0.2:
        del parts[name]
    data: bytes = write(parts)
    return data


def saved_arrays(parts: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    np.savez(out, **parts)
    return out.getvalue()


def in_saved(honest: bytes, rng: random.Random) -> bytes:
    found = torch.load(io.BytesIO(honest), weights_only=True)
    tensor = odd_tensor(rng)
    others = (tensor.expand(2, *tensor.shape), torch.eye(4).to_sparse_csr(), tensor.to("meta"))
    key = rng.choice([*found, "client", "identity", "public", "classes", "num_classes"])
    found[key] = rng.choice((tensor, *others, *ODD))
    return saved(found, rng.random() < 0.8)


BY_KIND: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": in_json,
    ".jsonl": in_lines,
    ".journal": in_journal,
    ".npz": lambda data, rng: in_parts(
        data, rng, lambda data: np.load(io.BytesIO(data)), odd_array, saved_arrays
    ),
    ".safetensors": lambda data, rng: in_parts(data, rng, load, odd_tensor, save),
    ".pt": in_saved,
}
