import itertools

import pytest
import torch

from flower_graph.rng import derive_seed, generator, seeded

CPU = torch.device("cpu")


def test_seeds_are_the_same_on_every_machine():
    assert derive_seed(0, "server-dropout", 1) == 1007082716428990296


def test_every_purpose_client_and_round_has_its_own_seed():
    labels = itertools.product((0, 1, 10), ("a", "b"), range(30), range(30))
    seeds = [derive_seed(seed, *rest) for seed, *rest in labels]
    assert len(set(seeds)) == len(seeds) and 0 <= min(seeds) < max(seeds) < 2**63
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_equal_labels_draw_equal_numbers():
    one, same, other = (torch.rand(3, generator=generator(5, "x", number)) for number in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    draws = []
    for number in (1, 1, 2):
        with seeded(CPU, 0, "test", number):
            draws.append(torch.rand(4))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_seeded_blocks_nest_and_leave_no_trace_even_after_an_error():
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    with seeded(CPU, 0, "outer"):
        expected = torch.rand(2)
    with pytest.raises(KeyError), seeded(CPU, 0, "outer"):
        first = torch.rand(1)
        with seeded(CPU, 0, "inner"):
            torch.rand(7)
        assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
        raise KeyError
    assert torch.equal(torch.random.get_rng_state(), state)
