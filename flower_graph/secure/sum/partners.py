"""The graph of partners, which share secrets in a secure sum, and the threshold of shares.

The parties are the SuperNodes. Their graph of partners is random, and every party has the same
small number of partners. With all pairs, cost would grow with the number of parties (Bonawitz et
al., CCS 2017); Bell et al. (CCS 2020) show that some random partners are enough. The graph is a
circle of the parties in random order, each joined to its k/2 neighbours on either side.

The threshold must be above half of the partners, for two reasons. First, a server may tell the
holders of a party's secrets different stories. An honest holder gives out one of the two secrets,
the seed or the mask key; a colluding holder gives both. With t shares needed of either, the server
gets both secrets if 2 t is at most the partners plus the colluders among them. Second, a server
that names the k/2 parties on one side of a party as vanished leaves it k/2 partners, and the
colluders among the k/2 that it has lost: if these were t, the circle could be cut there, and at a
second place, and two small sums would come out in place of a large one.
"""

import hashlib
import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import refuse_if

# Chance that the secrets of some party cannot be recovered although no more parties than agreed
# vanished: the round is skipped. Chance that colluders learn a party's sum.
LOST, BROKEN = 2.0**-20, 2.0**-40
# Below this many partners a party takes all others: few partners are no saving, and a threshold
# of one or two would put a secret into one or two hands.
FEWEST = 12


def check_shares(dropout: float, corrupt: float) -> None:
    """Refuse shares of dropouts and colluders that no choice of partners among many stands."""
    for name, share in (("dropout", dropout), ("corrupt", corrupt)):
        refuse_if(not 0 <= share < 1, f"{name} is {share}, must be from 0 to below 1", ValueError)
    # The parties that are left must be more than half of all, plus half of the colluders.
    why = f"dropout is {dropout}, corrupt {corrupt}: 2 dropout + corrupt must be below 1"
    refuse_if(2 * dropout + corrupt >= 1, why, ValueError)


@lru_cache(maxsize=256)
def plan(
    num_parties: int, dropout: float, corrupt: float, broken: float = BROKEN
) -> tuple[int, int, int]:
    """Return the number of partners, the threshold of shares, and how many parties may vanish."""
    # A share of few parties is a whole number of them, which may be one too many: of five a share
    # of 0.4 is two, too many; of four it is one. So fewer may vanish than asked for where no
    # choice stands as many: a party that leaves or joins must not stop the others' sums.
    check_shares(dropout, corrupt)
    colluding = math.floor(corrupt * num_parties)
    # Fewer than two contributors make no sum, so more than m - 2 need not be borne.
    for vanished in range(min(math.floor(dropout * num_parties), num_parties - 2), -1, -1):
        if chosen := _search(num_parties, vanished, colluding, broken):
            return *chosen, vanished
    raise ValueError(f"corrupt is {corrupt:g}: too much for {num_parties} parties")


def _search(
    num_parties: int, vanished: int, colluding: int, broken: float
) -> tuple[int, int] | None:
    # The smallest k is taken for which a threshold t exists such that, over the draw of the graph,
    # the chance that any party has fewer than t surviving partners is at most 2^-20, and t is
    # above k/2 plus as many as collude in any k/2 places of the circle in a row but with chance
    # ``broken``. So any party's k partners have at most twice as many colluders. That
    # vanished and colluding parties cut the circle in two has at most the chance ``broken`` too.
    # Of the possible t the largest is taken.
    others = num_parties - 1
    for k in [*range(FEWEST, others, 2), others]:
        thresholds = np.arange(1, k + 1)
        survivors = _chances(others, others - vanished, k)[:-1].cumsum()
        # A whole graph has no circle to cut: there only the two secrets of a party count.
        # The most colluders among k/2 neighbours on the circle, but by a rare chance
        at_least = _chances(num_parties, colluding, k // 2)[:0:-1].cumsum()
        extra = colluding if k == others else 2 * int((num_parties * at_least > broken).sum())
        good = (num_parties * survivors <= LOST) & (2 * thresholds > k + extra)
        # Two whole runs of k/2 neighbours among the gone, which alone cut the circle: of fewer than
        # m^2 / 2 pairs of runs each is among the gone with chance C(gone, k) / C(m, k).
        m, gone, cut = num_parties, vanished + colluding, -math.inf
        if k < others and gone >= k:
            of_gone, of_all = (math.lgamma(n + 1) - math.lgamma(n - k + 1) for n in (gone, m))
            cut = 2 * math.log(m) - math.log(2) + (of_gone - of_all)
        if good.any() and cut <= math.log(broken):
            return k, int(thresholds[good][-1])
    return None


def partners(parties: NDArray[np.int64], k: int, seed: int, server_round: int) -> NDArray[np.int64]:
    """Draw the graph of one round."""
    # parties [m]
    m = parties.size
    hashed = hashlib.shake_256(f"partners {seed} {server_round}".encode())
    result: NDArray[np.int64] = parties[circle(order_by(hashed.digest(8 * m)), k)]
    return result


def order_by(digest: bytes) -> NDArray[np.intp]:
    """Order positions by eight bytes of a hash each, whatever the version of a generator."""
    return np.argsort(np.frombuffer(digest, "<u8"), kind="stable")


def circle(order: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Join each of the rows 0 to m - 1 to its k neighbours in a circular order."""
    # order [m]. The party in column j of my row has me in column k - 1 - j.
    m = order.size
    result = np.empty((m, k), np.int64)
    result[order] = order[(np.arange(m)[:, None] + steps(m, k)) % m]
    return result


def steps(m: int, k: int) -> NDArray[np.int64]:
    """Return the offsets of a party's k partners on a circle of m positions."""
    # The nearest k/2 ahead, then the nearest k/2 behind.
    return np.concatenate([np.arange(1, (k + 1) // 2 + 1), np.arange(m - k // 2, m)])


def _chances(n: int, marked: int, k: int) -> NDArray[np.float64]:
    # As scipy.stats has it, which takes longer to import than many a run takes.
    factorials, result = _log_factorials(n), np.arange(max(0, k - (n - marked)), k + 1)
    result = result[result <= marked]

    def ways(n: int, k: NDArray[np.int64]) -> NDArray[np.float64]:
        of_k: NDArray[np.float64] = factorials[n] - factorials[k] - factorials[n - k]
        return of_k

    chances = np.zeros(k + 1)
    both = ways(marked, result) + ways(n - marked, k - result)
    chances[result] = np.exp(both - ways(n, np.array(k)))
    return chances


@lru_cache(maxsize=4)
def _log_factorials(n: int) -> NDArray[np.float64]:
    result: NDArray[np.float64] = np.concatenate([[0.0], np.log(np.arange(1, n + 1)).cumsum()])
    return result
