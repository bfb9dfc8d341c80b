"""Every entry of each request, told otherwise: of sums, FedSCem's with its alignment, PPFL-GNN's.

Under a server that may lie. nFedGNN's and FedGLS's servers see what clients send by design, so that
no entry of a request can make it more readable.
"""

from collections.abc import Callable

import pytest
from told_otherwise import WORLDS, Cell, World

from flower_graph.secure.align.blinded import OF_BLOCK
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.sum.messages import SumTerms

CLOSED = ("-", "refused", "no readable sum", "summed")
Get = Callable[[str], World]
FAST = (  # besides what lying_grid tells, all of which is refused
    ("sum", "train.sum_mask config/fraction-bits", "one"),
    ("sum", "train.sum_mask config/guard-bits", "all"),
    ("sum", "train.sum_epoch config/epoch-seeds", "run"),
    ("sum", "train.sum_mask config/limit", "one"),
    ("sum", "train.sum_reveal config/reveal-limit", "one"),
    ("sum", "train.sum_list config/list-parties", "one"),
)
# Of which CI tries all; all others wait for a release
SOME = {"sum": ["train.sum_mask config/mask-live"], "PPFL-GNN": ["train config/claim-means"]}


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


@pytest.mark.parametrize(("name", "entry", "how"), FAST)
def test_some_entries_told_otherwise(name: str, entry: str, how: str, world: Get) -> None:
    assert world(name).outcome(Cell(entry, how)) in CLOSED


@pytest.mark.release
def test_the_table_would_find_a_key_holder_that_takes_anybodys_points(
    world: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = Registry.verify

    def verified(self: Registry, party: int, signature: bytes, purpose: bytes, *of: bytes) -> bool:
        return purpose == OF_BLOCK or verify(self, party, signature, purpose, *of)

    monkeypatch.setattr(Registry, "verify", verified)
    cell = Cell("train.align config/align-points", "run")
    assert "no client blinded" in world("FedSCem").outcome(cell)


@pytest.mark.slow
def test_the_table_would_find_a_sum_that_is_not_bound(
    world: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the terms in the masks, finer numbers of one stand above the others' in the sum."""
    monkeypatch.setattr(SumTerms, "digest", lambda *_: bytes(32))
    cell = Cell("train.sum_mask config/fraction-bits", "one")
    assert world("sum").outcome(cell).startswith("told: ")


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        *(pytest.param(*one, marks=pytest.mark.slow) for one in SOME.items()),
        *(pytest.param(name, None, marks=pytest.mark.release) for name in WORLDS),
    ],
)
@pytest.mark.timeout(7200)
def test_every_value_told_otherwise(name: str, entries: list[str] | None, world: Get) -> None:
    one = world(name)
    cells = [cell for entry in entries or one.entries for cell in one.cells(entry)]
    found = {cell: one.outcome(cell) for cell in cells}
    assert {cell: what for cell, what in found.items() if what not in CLOSED} == {}
