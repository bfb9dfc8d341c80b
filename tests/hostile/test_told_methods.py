"""Every field of each request, told otherwise: of sums, FedSCem's with its alignment, PPFL-GNN's.

nFedGNN's and FedGLS's servers see what clients send by design, so that no entry of a request can
make it more readable; docs/results/told-otherwise.md has the line.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from told_otherwise import AGREED, HOW, RINGS, WORLDS, Cell, World

from flower_graph.secure.align.blinded import OF_BLOCK
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.sum.messages import SumTerms

PAGE = Path(__file__).parents[2] / "docs" / "results" / "told-otherwise.md"
CLOSED = ("-", "refused", "no readable sum", "summed")
HEADING = "## What tells something"
Get = Callable[[str], World]
FAST = (  # besides what lying_grid tells, all of which is refused
    ("sum", "MaskRequest.fraction-bits", "one", 0),
    ("sum", "MaskRequest.guard-bits", "all", 0),
    ("sum", "EpochRequest.epoch-seeds", "run", 0),
    ("sum", "MaskRequest.word", AGREED, 0),
    ("sum", "MaskRequest.limit", "one", 0),
    ("sum", "RevealRequest.reveal-limit", "one", 0),
    ("sum", "ListRequest.list-parties", "one", 0),
    ("sum, trusted", "PrepareRequest.prepare-threshold", "one", 0),
    ("sum, trusted", "UnmaskRequest.unmask-kinds", "replayed", 0),
    ("sum, trusted", "MaskRequest.limit", AGREED, 0),
    ("FedSCem", "EvaluateRequest.align-points", "run", 0),
    ("PPFL-GNN", "Claims.claim-means", "run", 0),
)
QUICK = ("sum", "sum, trusted", "PPFL-GNN")
# Of which CI runs all cells; all others wait for a release
FIXED = {
    "sum": ("MaskRequest.limit", "ListRequest.list-parties", "MaskRequest.mask-live"),
    "sum, trusted": ("MaskRequest.guard-bits", "PrepareRequest.prepare-minimum"),
    "FedSCem": ("EgoRequest.contributors", "UnionRequest.align-holders"),
    "PPFL-GNN": ("Claims.claim-means",),
    "FedSCem, trusted": ("UnionRequest.align-cells",),
    "PPFL-GNN, trusted": ("SumOrder.slots",),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Make each method's table when it is asked for."""
    made = dict[str, World]()

    def get(name: str) -> World:
        if name not in made:
            folder = tmp_path_factory.mktemp("told") / "keys"
            folder.mkdir()
            made[name] = WORLDS[name].open(folder)
        return made[name]

    return get


def told_by_design(name: str) -> set[tuple[str, str]]:
    """Read which entries of a method, told how, tell something, as the page has it."""
    section = PAGE.read_text().split(f"{HEADING}\n", 1)[1].split("\n#", 1)[0]
    rows = re.findall(r"^\| (.+?) \| (`.+?) \| (.+?) \|", section, re.MULTILINE)
    return {
        (key, how)
        for who, keys, told in rows
        for key in re.findall("`(.+?)`", keys)
        for how in told.split(", ")
        if name in who.split("; ")
    }


def check(world: World, name: str, cell: Cell) -> None:
    found = world.outcome(cell)
    assert found in CLOSED or (str(cell.entry), cell.how) in told_by_design(name), found


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in WORLDS],
)
def test_the_table_has_every_entry_that_is_declared_and_every_one_that_is_sent(
    name: str, world: Get
) -> None:
    one = world(name)
    sent = {entry.key for entry in one.entries.values()}
    assert set(one.entries) - set(one.known) == set(one.never)
    # Of a ring that a method passes on as it is, and of checkpoints
    assert one.keys - sent - one.below <= {*RINGS, "resume-round", "resume-attempt", "run-token"}
    for key in one.known:
        every = {*HOW, AGREED} if one.entries[key].key in RINGS else set(HOW)
        assert {cell.how for cell in one.cells(key)} == every
    assert {key for key, _ in told_by_design(name)} <= set(one.known)


@pytest.mark.parametrize(
    ("name", "key", "how", "value"),
    FAST,
)
def test_some_entries_told_otherwise(name: str, key: str, how: str, value: int, world: Get) -> None:
    one = world(name)
    check(one, name, Cell(one.entries[key], how, value))


@pytest.mark.slow
def test_the_table_would_find_a_key_holder_that_takes_anybodys_points(
    world: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = Registry.verify

    def verified(self: Registry, party: int, signature: bytes, purpose: bytes, *of: bytes) -> bool:
        return purpose == OF_BLOCK or verify(self, party, signature, purpose, *of)

    monkeypatch.setattr(Registry, "verify", verified)
    one = world("FedSCem")
    cell = Cell(one.entries["EvaluateRequest.align-points"], "run")
    assert "no client blinded" in one.outcome(cell)


def test_the_table_would_find_a_sum_that_is_not_bound(
    world: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the terms in the masks, finer numbers of one stand above the others' in the sum."""
    monkeypatch.setattr(SumTerms, "digest", lambda *_: bytes(32))
    cell = Cell(world("sum").entries["MaskRequest.fraction-bits"], "one")
    assert world("sum").outcome(cell).startswith("told apart")


EVERY = [(name, key) for name, one in WORLDS.items() for key in one.requests().keys() - one.never]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        pytest.param(
            *one, marks=pytest.mark.slow if one[1] in FIXED[one[0]] else pytest.mark.release
        )
        for one in sorted(EVERY)
    ],
)
@pytest.mark.timeout(1200)
def test_an_entry_told_otherwise(name: str, key: str, world: Get) -> None:
    """Each cell is closed or on the page, and what is on the page is so."""
    one = world(name)
    found = {cell: one.outcome(cell) for cell in one.cells(key)}
    told = {cell: what for cell, what in found.items() if what not in CLOSED}
    assert {(str(cell.entry), cell.how) for cell in told} == {
        listed for listed in told_by_design(name) if listed[0] == key
    }, told
