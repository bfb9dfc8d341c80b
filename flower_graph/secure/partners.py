"""Who shares secrets with whom: a random graph in which every client has the same few partners.

With all pairs, cost would grow with the number of clients (Bonawitz et al., CCS 2017). Bell et al.
(CCS 2020) show that about log m random partners are enough. The graph is a circle of the clients
in random order in which each is joined to its k/2 neighbours on either side, drawn anew each round.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from flower_graph.rng import generator

# Chance that the secrets of some client cannot be recovered although no more clients than agreed
# vanished: the round is skipped. Chance that those who collude learn a client's vector.
LOST, BROKEN = 2.0**-20, 2.0**-40
# Below this many partners a client takes all others: few partners are no saving, and a threshold
# of one or two would put a secret into one or two hands.
FEWEST = 12


@lru_cache(maxsize=256)
def plan(num_clients: int, dropout: float, corrupt: float) -> tuple[int, int]:
    """Choose the number of partners and of shares that give a secret back."""
    # The smallest k is taken for which a threshold t exists such that, over the draw of the graph,
    # the chance that any client has fewer than t surviving partners is at most 2^-20, the chance
    # that any has t colluding partners is at most 2^-40, and so is the chance that vanished and
    # colluding clients cut the circle in two. Of the possible t the largest is taken.
    if num_clients < 2:
        raise ValueError(f"num_clients is {num_clients}, must be at least 2")
    for name, share in (("dropout", dropout), ("corrupt", corrupt)):
        if not 0 <= share < 1:
            raise ValueError(f"{name} is {share}, must be from 0 to below 1")
    # Fewer than two contributors make no sum, so more than m - 2 need not be borne.
    vanished = min(math.floor(dropout * num_clients), num_clients - 2)
    colluding = math.floor(corrupt * num_clients)
    others = num_clients - 1
    factorials = np.concatenate([[0.0], np.log(np.arange(1, others + 1)).cumsum()])
    for k in [*range(FEWEST, others, 2), others]:
        thresholds = np.arange(1, k + 1)
        survivors = _chances(factorials, others - vanished, k)[:-1].cumsum()
        colluders = _chances(factorials, min(colluding, others), k)[:0:-1].cumsum()[::-1]
        good = (num_clients * survivors <= LOST) & (num_clients * colluders <= BROKEN)
        is_whole = k == others or _log_cut(num_clients, vanished + colluding, k) <= math.log(BROKEN)
        if good.any() and is_whole:
            return k, int(thresholds[good][-1])
    raise ValueError(
        f"with {num_clients} clients no choice of partners stands {vanished} that vanish "
        f"(dropout {dropout:g}) and {colluding} that collude (corrupt {corrupt:g}); lower one"
    )


def partners(clients: NDArray[np.int64], k: int, seed: int, server_round: int) -> NDArray[np.int64]:
    """Draw the graph of one round."""
    # clients [m]
    m = clients.size
    if not 1 <= k < m or (k % 2 and k != m - 1):
        raise ValueError(f"k is {k}, must be even and below {m - 1}, or {m - 1}")
    order = torch.randperm(m, generator=generator(seed, "partners", server_round)).numpy()
    # Steps along the circle: the nearest k/2 ahead, then the nearest k/2 behind.
    steps = np.concatenate([np.arange(1, (k + 1) // 2 + 1), np.arange(m - k // 2, m)])
    result = np.empty((m, k), np.int64)
    result[order] = clients[order[(np.arange(m)[:, None] + steps) % m]]
    return result


def _chances(factorials: NDArray[np.float64], marked: int, k: int) -> NDArray[np.float64]:
    """Give the chance of 0 to k marked ones among k drawn: hypergeometric, from log factorials."""
    # As scipy.stats has it, which takes longer to import than many a run takes.
    n, result = factorials.size - 1, np.arange(max(0, k - (factorials.size - 1 - marked)), k + 1)
    result = result[result <= marked]
    ways = _log_ways(factorials, marked, result) + _log_ways(factorials, n - marked, k - result)
    chances = np.zeros(k + 1)
    chances[result] = np.exp(ways - _log_ways(factorials, n, np.array(k)))
    return chances


def _log_ways(factorials: NDArray[np.float64], n: int, k: NDArray[np.int64]) -> NDArray[np.float64]:
    """Give the log of n over k."""
    ways: NDArray[np.float64] = factorials[n] - factorials[k] - factorials[n - k]
    return ways


def _log_cut(m: int, gone: int, k: int) -> float:
    """Bound the log of the chance that two whole runs of k/2 neighbours are among the gone."""
    # Only that cuts the circle. There are fewer than m^2 / 2 pairs of runs, and each pair, k places
    # in all, is among the gone with chance C(gone, k) / C(m, k).
    if gone < k:
        return -math.inf
    chosen = math.lgamma(gone + 1) - math.lgamma(gone - k + 1)
    chosen += math.lgamma(m - k + 1) - math.lgamma(m + 1)
    return 2 * math.log(m) - math.log(2) + chosen
