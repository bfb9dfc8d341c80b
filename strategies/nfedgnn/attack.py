"""nFedGNN: which features a user has, from its latent vectors and its gradients.

A user's latent vector is ``x W + b``. ``W`` starts from a matrix of the seed's, and Adam moves
a row of it by gradients that the server itself has sent. So a server that guesses that a feature is
in ``x``, and its size, can compute the feature's row in every round, and each round adds as many
linear equations for ``x`` as a latent vector has numbers. Without weight decay all rows would move
alike, and later rounds would tell nothing. For a wrong size the equations have no solution.

With one layer for all, a server that reads the sums of gradients steps as all users do. Under masks
it can use the seed's first weights instead, and it can compare users, whose latent vectors are maps
of features by the same ``W``. A factorisation of all vectors into features and weights is no use:
no factor tells which feature is which word.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from scipy.optimize import nnls

from flower_graph.audit.attacks import (
    NO_NOISE,
    Audit,
    Exchange,
    Finding,
    Floats,
    RecordingGrid,
    alike,
    array_of,
    audit_rng,
    config_of,
    of_kind,
    retrieved,
)
from flower_graph.data.sources.datasets import cached_data
from flower_graph.ops.adam import Adam
from flower_graph.ops.peers import cosine_similarities
from flower_graph.strategies.nfedgnn.algorithm import UserSettings, shared_linear_weight
from flower_graph.strategies.nfedgnn.client import EnrolmentRequest, LatentRequest, RelayRequest
from flower_graph.strategies.nfedgnn.config import AVERAGED, OWN, SUMMED, NFedGNNConfig
from flower_graph.wire import keys

# A bag of words: how many different ones a user may have, if its features sum to one
MOST_WORDS = 40
USERS = 25  # that are attacked in a run: each takes a second
EQUATIONS = 160  # more of them make the search slow, and hardly better
# Singular values below this share of the largest are drowned by float32's rounding.
RANK_TOLERANCE = 1e-6
SEARCH_STEPS = 6000  # of non-negative least squares
COMPARED = 300  # users that are compared with each other

M = TypeVar("M", LatentRequest, RelayRequest)
Scores = dict[str, dict[int, Floats]]  # each user's features, by the name of the attack


class Step(NamedTuple):
    """One request to a user, and its answer."""

    gradient: Floats | None  # [h], or the layer's [f, h], that it is to apply; None without one
    # [f, h] averaged weights that it is to take over before that; NaN rows stay
    average: Floats | None
    latent: Floats  # [h] what it answers; or of all users, [n, h]
    rate: float = 0.0  # of the step that applies the gradient


def requests_of(
    exchanges: Sequence[Exchange], kind: type[M]
) -> Iterator[tuple[M, Callable[[str], Floats]]]:
    """Give each round's request, and a function that reads an array of its reply."""
    for one in of_kind(exchanges, "train"):
        records = one.request.array_records.values()
        arrays = [array.numpy() for record in records for array in record.values()]
        request = kind.from_numpy(arrays, config_of(one.request))
        yield request, partial(array_of, one.reply, keys.ARRAYS)


def settings_of(exchanges: Sequence[Exchange]) -> UserSettings:
    """Return the users' settings, which a client gets when it enrols."""
    enrolment = next(of_kind(exchanges, "query"))
    return EnrolmentRequest.from_config(config_of(enrolment.request)).settings


# Equations, and their solutions -------------------------------------------------------------------


def course(start: Floats, value: float, settings: UserSettings, steps: Sequence[Step]) -> Floats:
    """Return the weights of features of size ``value``, and the bias, in each round."""
    # start [f, h], with a bias its last row; [T, f, h]
    weight, result = torch.from_numpy(start.copy()), []
    sizes = torch.full_like(weight[:, :1], value)
    if settings.bias:
        sizes[-1] = 1
    adam = Adam([weight], weight_decay=settings.weight_decay)
    for step in steps:
        if step.average is not None:
            new = torch.from_numpy(step.average).to(weight)
            weight.copy_(torch.where(new.isnan(), weight, new))
        if step.gradient is not None:
            slope = sizes * torch.from_numpy(step.gradient).to(weight)
            weight.grad, adam.lr = slope, step.rate
            adam.step()
        result.append(weight.numpy().copy())
    return np.stack(result)


def equations(rows: Floats, latents: Floats, features: int) -> tuple[Floats, Floats]:
    """Return the equations that a user's features meet: a matrix ``[T h, f]`` and a vector."""
    # rows [T, f, h] of weights, then of a bias; latents [T, h]
    matrix = rows[:, :features].transpose(0, 2, 1).reshape(-1, features).astype(float)
    return matrix, (latents - rows[:, features:].sum(1)).ravel().astype(float)


# Each returns the ``x`` that is nearest to solving the equations, ``[f]``: the shortest, or one
# without negative numbers, which has at most as many features as there are equations.
SOLVERS: dict[str, Callable[[Floats, Floats], Floats]] = {
    "least squares": lambda matrix, target: np.linalg.lstsq(matrix, target, rcond=None)[0],
    "sparse": lambda matrix, target: nnls(matrix, target, maxiter=SEARCH_STEPS)[0],
}


def from_sequence(
    start: Floats, settings: UserSettings, steps: Sequence[Step], values: Sequence[float]
) -> tuple[Floats, float]:
    """Return each feature's score from all equations of a sequence, and the features' value."""
    steps = steps[: max(1, EQUATIONS // settings.latent_size)]
    latents, features = np.stack([step.latent for step in steps]), len(start) - settings.bias
    found = [
        equations(course(start, value, settings, steps), latents, features) for value in values
    ]
    best = int(np.argmin([_unexplained(*one) for one in found]))
    (matrix, target), value = found[best], values[best]
    return SOLVERS["sparse"](matrix, target / value), value


def _unexplained(matrix: Floats, target: Floats) -> float:
    """Return the part of the target that the columns do not explain, 0 to 1."""
    size, space = np.linalg.eigh(matrix @ matrix.T)
    space = space[:, size > size[-1] * RANK_TOLERANCE**2]
    rest = target - space @ (space.T @ target)
    return float(np.linalg.norm(rest) / np.linalg.norm(target)) if target.any() else 0.0


# Each form --------------------------------------------------------------------------------------


def own_scores(
    exchanges: Sequence[Exchange], drawn: Sequence[int], features: int, *, sums_to_one: bool
) -> Scores:
    """Score users' features by their first latent vector, and by all latents and gradients."""
    settings, steps = settings_of(exchanges), {user: list[Step]() for user in drawn}
    taken = dict.fromkeys(drawn, 0)  # the round of the last mean of each
    for request, reply in requests_of(exchanges, RelayRequest):
        latent = reply("relay")
        for place, user in enumerate(request.users.tolist()):
            if user in steps:
                gradient = request.gradient[place] if request.gradient_round[place] else None
                average = request.average if taken[user] < request.average_round else None
                taken[user] = max(taken[user], request.average_round)
                steps[user].append(Step(gradient, average, latent[place], request.rate))
    start = shared_linear_weight(features, settings).numpy().astype(float)
    values = [1 / count for count in range(1, MOST_WORDS + 1)] if sums_to_one else [1.0]
    steps = {user: local for user, local in steps.items() if local}
    result = Scores()
    for kind, solve in SOLVERS.items():
        result[f"from one latent, {kind}"] = {
            user: solve(*equations(start[None], local[0].latent[None], features))
            for user, local in steps.items()
        }
    every = {u: from_sequence(start, settings, local, values)[0] for u, local in steps.items()}
    return result | {"from all latents and gradients, sparse": every}


def common_scores(
    exchanges: Sequence[Exchange], drawn: Sequence[int], users: int, features: int
) -> tuple[Scores, list[Floats]]:
    """Score users' features by the equations of one round and of all rounds.

    Follow the layer by the sums, if they can be read; return the rounds' latent vectors, too.
    """
    # [n, h] without dropout, by the round of the layer's last step; and what the step was made of
    latents, sums = dict[int, Floats](), dict[int, tuple[Floats, float]]()
    settings = settings_of(exchanges)
    for request, reply in requests_of(exchanges, LatentRequest):
        advance, at = request.advance, request.advance.layer_round
        if advance.total is not None:
            sums.setdefault(at, (advance.total.copy(), advance.rate))
        if request.measured.size:
            here = latents.setdefault(at, np.zeros((users, settings.latent_size)))
            here[request.measured] = reply("measured")
    seen = [latents[at] for at in sorted(latents)]
    steps = [
        Step(total, None, latents[at], rate)
        for at in sorted(latents)
        for total, rate in [sums.get(at, (None, 0.0))]
    ]
    rows = course(shared_linear_weight(features, settings).numpy(), 1.0, settings, steps)
    how, result = "the layer followed" if sums else "the seed's first weights", Scores()
    for name, count in (("one round", 1), (f"{len(seen)} rounds", len(seen))):
        latent = np.stack(seen[:count])
        local = {user: equations(rows[:count], latent[:, user], features) for user in drawn}
        for kind, solve in SOLVERS.items():
            result[f"{kind}, {name}, by {how}"] = {u: solve(*one) for u, one in local.items()}
    return result, seen


class RelayAudit(Audit[NFedGNNConfig]):
    """The attacks on a run of nFedGNN."""

    rounds = 10
    one_supernode = True  # messages have a row for each user in any case
    notes = (
        "Guesses are as many as the user has features, which the attacker is told; `wholly` is the "
        "share of users all of whose features are found. From one latent the attacker solves "
        "`x W = latent`. From all of them it also follows each row of `W` through Adam's steps, "
        "with the gradients that were sent, and finds out how large a feature is. It supposes that "
        "all features of a user that are not zero are equally large; where they were scaled to "
        "sum to one, that there are 40 at most.",
        "Chance is a blind guess. Somebody who knows which words are common does better without "
        "any message.",
    )

    def counterparts(self, config: NFedGNNConfig, noisy: Sequence[list[str]]) -> list[list[str]]:
        if config.strategy.share == SUMMED:
            averaged = [f"strategy.share={AVERAGED}", "strategy.average_every=5"]
            return [[], ["strategy.aggregation=masked"], [f"strategy.share={OWN}"], averaged]
        # Weights that are averaged get no noise, so it is refused beside.
        return [[], [NO_NOISE]] if config.strategy.share != OWN else [[], [NO_NOISE], *noisy]

    def label(self, config: NFedGNNConfig) -> str:
        share, label = config.strategy.share, super().label(config)
        if share == SUMMED:
            share = f"{share}, {config.strategy.aggregation} sums"
        return label if share == OWN else f"{share}, {label}"

    def attack(self, config: NFedGNNConfig, grid: RecordingGrid, method: object) -> list[Finding]:
        x, rng = cached_data(config).x.to_dense().numpy(), audit_rng(config)
        having = np.flatnonzero((x != 0).any(1))
        drawn = rng.choice(having, min(USERS, having.size), replace=False).tolist()
        if config.strategy.share == SUMMED:
            scores, latents = common_scores(grid.exchanges, drawn, *x.shape)
        else:
            sums_to_one = "row" in config.data.features
            scores = own_scores(grid.exchanges, drawn, x.shape[1], sums_to_one=sums_to_one)
            request, reply = next(requests_of(grid.exchanges, RelayRequest))
            latents = [np.zeros((len(x), request.gradient.shape[1]))]
            latents[0][request.users] = reply("relay")
        found = [
            retrieved(f"features, {name}", x[list(one)] != 0, list(one.values()), rng)
            for name, one in scores.items()
        ]
        # Which pairs of users have more common features than most pairs
        chosen = rng.choice(len(x), min(COMPARED, len(x)), replace=False)
        common = cosine_similarities((x[chosen] != 0).astype(float))
        common = common[np.triu_indices(chosen.size, 1)]
        rows = np.concatenate(latents, 1)[chosen]
        name = "which users have features in common, from latents"
        return [*found, alike(name, rows, common > np.quantile(common, 0.95))]
