"""What the server of FedSCem receives in a whole run, byte by byte.

Every reply is recorded, those of the set-up included, and what is looked for is known: the clients'
identities and their embeddings. With plain sums the same search finds them, so it can.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from ego_helpers import CLASSES, FEATURES, SETTINGS
from ego_strategy_helpers import FINE, client_app
from flwr.app import ArrayRecord, RecordDict
from graph_helpers import toy
from public_helpers import bytes_of

from flower_graph import MaskedEmbeddingAveraging
from flower_graph.audit.attacks import RecordingGrid
from flower_graph.data.graph import ClientGraph
from flower_graph.secure.align.blinded import canonical, hash_to_group, plain_token
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.server import SumResult, SumRound
from flower_graph.strategies.fedscem.vector import Layout, VectorEncoding
from flower_graph.wire.keys import ARRAYS, MASKED_SUM, SUMS, TOTAL

M, PER_CLIENT, HIDDEN, ROUNDS = 6, 6, 16, 5


def private_egos(seed: int) -> list[ClientGraph]:
    """Six clients on a circle of nodes, each of which two clients hold; identities are long."""
    names, egos = np.random.default_rng(seed).integers(2**50, 2**60, M * PER_CLIENT // 2), []
    for client in range(M):
        own = np.roll(names, -client * PER_CLIENT // 2)[:PER_CLIENT].tolist()
        draws = [torch.Generator().manual_seed(name) for name in own]
        x = [torch.rand(FEATURES, generator=draw).tolist() for draw in draws]
        graph = toy(client, x, [name % CLASSES for name in own], [(0, 1), (2, 5)])
        egos.append(replace(graph, nodes=torch.tensor(own)))
    return egos


@dataclass
class Record:
    """A run as its server saw it, and what it was not to see."""

    received: list[tuple[str, RecordDict]]
    run_id: bytes
    losses: list[float]
    totals: list[SumResult]  # after the masks were taken away
    slots: int
    embeddings: list[torch.Tensor]

    @property
    def bytes(self) -> bytes:
        return b"|".join(bytes_of(content) for _, content in self.received)

    def vectors(self, part: str = "embeddings") -> list[np.ndarray]:
        """One part of every vector that came in a round."""
        place = getattr(Layout(self.slots, HIDDEN), part)
        own = [content for kind, content in self.received if kind == "train"]
        arrays = [one[SUMS][TOTAL] if SUMS in one else one[ARRAYS][MASKED_SUM] for one in own]
        found = [array.numpy() for array in arrays]
        return [total[place] for total in found if total.size > self.slots * HIDDEN]


def observe(*, seed: int = 0, supernodes: int = M, **options: Any) -> Record:
    embeddings, totals, losses = list[torch.Tensor](), list[Any](), list[float]()
    add_up, result = VectorEncoding.add_up, SumRound.result

    def spy_on_client(*how: Any) -> Any:
        embeddings.append(how[3].clone())
        return add_up(*how)

    def spy_on_server(one: SumRound) -> Any:
        totals.append(result(one))
        return totals[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VectorEncoding, "add_up", spy_on_client)
        patch.setattr(SumRound, "result", spy_on_server)
        settings = replace(SETTINGS, hidden=HIDDEN)
        app = client_app(private_egos(seed), settings=settings)
        grid = RecordingGrid(app, num_supernodes=supernodes)
        server = MaskedEmbeddingAveraging(settings, **{**FINE, **options})
        server.start(grid, num_rounds=ROUNDS, on_round=lambda report: losses.append(report.loss))
    session = server.session
    length = Layout(session.num_slots, HIDDEN).length
    sums = [total for total in totals if total.total.size == length]
    received = [(one.kind, one.reply) for one in grid.exchanges]
    return Record(received, session.sums.server.run_id, losses, sums, session.num_slots, embeddings)


@pytest.fixture(scope="module")
def masked() -> Record:
    return observe()


@pytest.fixture(scope="module")
def plain() -> Record:
    return observe(aggregation="plain", alignment="plain")


# Identities and embeddings -----------------------------------------------------------------------

RING = Ring.fit(M, FINE["limit"], FINE["resolution"], guard=True)


def identities(record: Record) -> Iterator[tuple[bytes, ...]]:
    """Give each identity in all the ways in which one could be written."""
    for number in {n for network in private_egos(0) for n in network.nodes.tolist()}:
        (text,) = canonical([number], "test")
        words = (number.to_bytes(8, order) for order in ("little", "big"))
        yield plain_token(text), hash_to_group(record.run_id, text), *words


def embeddings(record: Record) -> Iterator[tuple[bytes, ...]]:
    """Give each embedding as floats and as words of the ring."""
    for row in (row for h in record.embeddings for row in h.numpy() if row.any()):
        ways = (row, row.astype(np.float64), RING.encode(row), -row, row.astype(">f4"))
        yield tuple(way.tobytes() for way in ways)


@pytest.mark.parametrize(
    ("secrets", "in_clear"), [(identities, M * PER_CLIENT // 2), (embeddings, 21)]
)
def test_no_identity_and_no_embedding_reaches_the_server(
    secrets: Any, in_clear: int, masked: Record, plain: Record
) -> None:
    found = [
        sum(any(way in blob for way in ways) for ways in secrets(record))
        for record in (masked, plain)
        for blob in (record.bytes,)
    ]
    assert found[0] == 0 and found[1] >= in_clear


def chi_squared(words: np.ndarray, from_byte: int = 0) -> float:
    """Chi-squared of the histogram of bytes against the uniform one; 255 is expected, 23 off."""
    data = words.view(np.uint8).reshape(-1, words.itemsize)[:, from_byte:]
    count = np.bincount(data.ravel(), minlength=256)
    expected = data.size / 256
    return float(((count - expected) ** 2 / expected).sum())


UNLIKELY = 255 + 8 * 23


def test_what_comes_is_noise(masked: Record, plain: Record) -> None:
    for part in ("embeddings", "counts", "metrics"):
        words = np.concatenate(masked.vectors(part))
        assert words.size >= 6 * 6 * ROUNDS
        assert chi_squared(words) < UNLIKELY, part
        assert chi_squared(np.concatenate(plain.vectors(part))) > 4 * UNLIKELY, part
    # In the clear the counts are ones and zeros; under masks no word comes twice.
    assert set(np.concatenate(plain.vectors("counts"))) == {0.0, 1.0}
    words = np.concatenate(masked.vectors("counts"))
    assert np.unique(words).size == words.size


def test_the_same_run_again_sends_other_words(masked: Record) -> None:
    again = observe()
    np.testing.assert_allclose(again.losses, masked.losses, rtol=0, atol=1e-12)
    for one, other in zip(masked.vectors(), again.vectors(), strict=True):
        assert not (one == other).any()


def test_without_masks_the_sums_are_still_under_pads(masked: Record, plain: Record) -> None:
    np.testing.assert_allclose(masked.losses, plain.losses, rtol=0, atol=1e-4)  # holders read them
    size = masked.slots * (HIDDEN + 1)
    sums = np.concatenate([found.total[:size] for found in masked.totals])
    assert len(masked.totals) == ROUNDS
    # Six contributors: the lowest bit of six times the common pad is known, so its byte is not
    # looked at.
    assert chi_squared(sums, from_byte=1) < UNLIKELY
    plain_sums = sum(np.array(plain.vectors()[:M]))
    words = RING.encode(np.clip(plain_sums, -30, 30))
    assert not (masked.totals[0].total[: words.size] == words).any()


# What cannot be hidden is the same for all data of the same size --------------------------------


def shape(record: Record) -> list[str]:
    """Keys, types and lengths of everything that came."""
    found = []
    for kind, content in record.received:
        for name, entries in content.items():
            for key, value in entries.items():
                size: Any = None
                if isinstance(entries, ArrayRecord):
                    size = value.dtype, tuple(value.shape)
                elif isinstance(value, (bytes, list)):
                    size = len(value)
                found.append(f"{kind} {name} {key} {type(value).__name__} {size}")
    return sorted(found)


@pytest.mark.parametrize("supernodes", [2, M])
def test_other_data_of_the_same_size_looks_the_same(supernodes: int, masked: Record) -> None:
    one = masked if supernodes == M else observe(supernodes=supernodes)
    other = observe(seed=1, supernodes=supernodes)
    # One that holds shares of a key may be asked more, and it is drawn for each run: by stage.
    assert shape(one) == shape(other)
    assert one.losses != other.losses
