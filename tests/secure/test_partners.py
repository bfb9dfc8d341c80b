import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.secure.sum.partners import partners, plan


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
    assert plan(2, 0.3, 0.1) == plan(2, 0.44, 0.1) == (1, 1, 0)
    assert plan(3, 0.3, 0.1) == (2, 2, 0)
    assert plan(10, 0.3, 0.1) == (9, 6, 3)  # three of nine partners may vanish, one may collude


def test_fewer_may_vanish_where_so_few_clients_stand_no_more():
    """A share of 0.4: one of four, but not two of five: two of four partners are not above half."""
    assert plan(6, 0.4, 0.1) == (5, 3, 2)
    assert plan(5, 0.4, 0.1) == (4, 3, 1)
    assert plan(4, 0.4, 0.1) == (3, 2, 1)
    assert plan(3, 0.4, 0.1) == (2, 2, 0)
    with pytest.raises(ValueError, match=r"corrupt is 0\.5"):
        plan(2, 0.0, 0.5)


@pytest.mark.parametrize("corrupt", [0.0, 0.1])
def test_every_number_of_clients_has_a_plan_above_half_of_the_partners(corrupt):
    for m in [*range(2, 150), 300, 1_000, 3_000, 10_000]:
        k, threshold, vanished = plan(m, 0.3, corrupt)
        assert vanished == min(int(0.3 * m), m - 2)
        colluding = int(corrupt * m)
        # In a whole graph any of those who collude are partners, and they give out both secrets.
        assert 2 * threshold > k + (colluding if k == m - 1 else 2 * round(corrupt * k / 2))


@pytest.mark.parametrize(
    ("m", "dropout", "corrupt"),
    [(20, 0.3, 0.1), (100, 0.2, 0.05), (100, 0.3, 0.1), (1_000, 0.3, 0.1), (1_000, 0.3, 0.02)],
)
def test_secrets_survive_in_drawn_graphs_and_whoever_loses_one_side_stays_below(
    m, dropout, corrupt
):
    k, threshold, _ = plan(m, dropout, corrupt)
    draw = np.random.default_rng(0)
    for t in range(200 if m < 1_000 else 10):
        gone = draw.permutation(m)[: int(dropout * m)]
        found = partners(np.arange(m), k, 1, t)
        assert (~np.isin(found, gone)).sum(1).min() >= threshold
        bad = np.isin(found, draw.permutation(m)[: int(corrupt * m)])
        # Honest holders give out one secret each, those who collude both: too few for two.
        assert k + bad.sum(1).max() < 2 * threshold
        # Nor is half of the partners enough, with those who collude in the other half.
        sides = bad[:, : k // 2].sum(1).max(), bad[:, k // 2 :].sum(1).max()
        assert k == m - 1 or k // 2 + max(sides) < threshold


def test_bad_input():
    with pytest.raises(ValueError, match=r"num_parties.*1"):
        plan(1, 0.3, 0.1)
    with pytest.raises(ValueError, match=r"dropout.*1"):
        plan(5, 1.0, 0.1)
    for dropout, corrupt in ((0.6, 0.6), (0.5, 0.0), (0.45, 0.1), (0.7, 0.1)):
        with pytest.raises(ValueError, match=f"{dropout}.*{corrupt}"):
            plan(10, dropout, corrupt)
    for k in (0, 3, 8):
        with pytest.raises(ValueError, match=f"{k}"):
            partners(np.arange(8), k, 0, 0)
