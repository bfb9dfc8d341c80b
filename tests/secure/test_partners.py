import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.secure.sum.server import partners, plan


@given(m=st.integers(2, 60), seed=st.integers(0, 1000), data=st.data())
def test_graph_is_regular_symmetric_and_mirrored(m, seed, data):
    k = data.draw(st.sampled_from([*range(2, m - 1, 2), m - 1]))
    clients = np.arange(m) * 3 + 5
    found = partners(clients, k, seed, 1)
    assert found.shape == (m, k)
    row = {client: index for index, client in enumerate(clients.tolist())}
    for client, own in zip(clients.tolist(), found.tolist(), strict=True):
        assert client not in own and len(set(own)) == k
        for column, partner in enumerate(own):
            assert found[row[partner], k - 1 - column] == client


def test_graph_is_new_in_each_round_and_the_same_for_the_same():
    clients = np.arange(50)
    first, again, second = (partners(clients, 4, 9, t) for t in (1, 1, 2))
    assert (first == again).all() and (first != second).any()


def test_few_clients_have_all_partners():
    for m in range(2, 14):
        assert plan(m, 0.3, 0.1)[0] == m - 1
    assert plan(2, 0.3, 0.1) == plan(2, 0.9, 0.1) == (1, 1)
    assert plan(3, 0.7, 0.1) == (2, 1)  # one of three may vanish, whatever the share says
    assert plan(10, 0.3, 0.1) == (9, 6)  # three of nine partners may vanish


def test_partners_grow_with_the_logarithm():
    k = [plan(m, 0.3, 0.1)[0] for m in (100, 1_000, 10_000)]
    assert k == sorted(k) and 24 <= k[0] <= 40
    assert k[2] < 1.5 * k[1]


@pytest.mark.parametrize(("m", "dropout", "corrupt"), [(20, 0.3, 0.1), (100, 0.2, 0.05)])
def test_secrets_survive_in_drawn_graphs(m, dropout, corrupt):
    k, threshold = plan(m, dropout, corrupt)
    draw = np.random.default_rng(0)
    for t in range(200):
        gone = draw.permutation(m)[: int(dropout * m)]
        bad = draw.permutation(m)[: int(corrupt * m)]
        found = partners(np.arange(m), k, 1, t)
        assert (~np.isin(found, gone)).sum(1).min() >= threshold
        assert np.isin(found, bad).sum(1).max() < threshold


def test_bad_input():
    with pytest.raises(ValueError, match="num_clients is 1"):
        plan(1, 0.3, 0.1)
    with pytest.raises(ValueError, match="dropout is 1"):
        plan(5, 1.0, 0.1)
    with pytest.raises(ValueError, match="lower one"):
        plan(10, 0.6, 0.6)
    for k in (0, 3, 8):
        with pytest.raises(ValueError, match=f"k is {k}"):
            partners(np.arange(8), k, 0, 0)
