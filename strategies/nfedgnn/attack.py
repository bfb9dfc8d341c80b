"""nFedGNN: which features a user has, from its latent vectors and its gradients.

A user's latent vector is ``x W + b``, and ``W`` starts from a matrix that the seed decides. Then
Adam moves a row of ``W`` by gradients that the server itself has sent. A server that guesses that a
feature is in ``x``, and its size, can compute the feature's row in every round. So each round adds
as many linear equations for ``x`` as a latent vector has numbers. Without weight decay all rows
would move alike, and later rounds would tell nothing; with it they do not.

The attack supposes that all nonzero features of a user are equally large, as in a bag of words. It
finds their value out: for a wrong value the equations have no solution.

With one layer for all, a server that reads the sums of gradients knows the layer ``W`` of every
round, because it can step as all users do. Under masks it does not. It can use the seed's first
weights instead, and it can compare users, because all latent vectors are maps of features by the
same ``W``. A factorisation of all vectors into features and weights is no use to the server: no
factor tells which feature is which word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls

from flower_graph.audit.attacks import (
    NO_NOISE,
    Audit,
    Exchange,
    RecordingGrid,
    array_of,
    audit_rng,
    config_of,
    of_kind,
)
from flower_graph.audit.scores import Finding, Floats, guesses, ranking, top
from flower_graph.data.sources.datasets import cached_data
from flower_graph.ops.adam import Adam
from flower_graph.ops.peers import cosine_similarities
from flower_graph.strategies.nfedgnn.config import AVERAGED, OWN, SUMMED, NFedGNNConfig
from flower_graph.strategies.nfedgnn.messages import EnrolmentRequest, LatentRequest, RelayRequest
from flower_graph.strategies.nfedgnn.users import UserSettings, shared_linear_weight
from flower_graph.wire import keys
from flower_graph.wire.codec import Message

# A bag of words: how many different ones a user may have, if its features sum to one
MOST_WORDS = 40
USERS = 25  # that are attacked in a run: each takes a second
EQUATIONS = 160  # more of them make the search slow, and hardly better
# Singular values below this share of the largest are drowned by float32's rounding.
RANK_TOLERANCE = 1e-6
SEARCH_STEPS = 6000  # of non-negative least squares
COMPARED = 300  # users that are compared with each other


M = TypeVar("M", bound=Message)
Scores = dict[str, dict[int, Floats]]  # each user's features, by the name of the attack


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


def read(
    exchanges: Sequence[Exchange], users: Sequence[int]
) -> tuple[UserSettings, dict[int, list[Step]]]:
    """Return the users' settings, and what some of them were sent and have answered."""
    steps = {user: list[Step]() for user in users}
    taken = dict.fromkeys(users, 0)  # the round of the last mean of each
    for request, reply in requests_of(exchanges, RelayRequest):
        latent = reply("relay")
        for index, user in enumerate(request.users.tolist()):
            if user not in steps:
                continue
            gradient = request.gradient[index] if request.gradient_round[index] else None
            average = request.average if taken[user] < request.average_round else None
            taken[user] = max(taken[user], request.average_round)
            steps[user].append(Step(gradient, average, latent[index], request.rate))
    return settings_of(exchanges), {user: local for user, local in steps.items() if local}


def own_scores(
    exchanges: Sequence[Exchange], users: Sequence[int], features: int, *, sums_to_one: bool
) -> Scores:
    """Score users' features by their first latent vector, and by all latents and gradients."""
    settings, steps = read(exchanges, users)
    start = shared_linear_weight(features, settings).numpy()[:features]
    values = [1 / count for count in range(1, MOST_WORDS + 1)] if sums_to_one else [1.0]
    attacks: dict[str, Callable[[list[Step]], Floats]] = {
        "one latent, least squares": lambda local: least_squares(local[0].latent, start),
        "one latent, sparse": lambda local: sparse_from_one(local[0].latent, start),
        "all latents and gradients, sparse": lambda local: sparse_from_sequence(
            start, settings, local, values
        )[0],
    }
    return {
        f"from {name}": {user: solve(local) for user, local in steps.items()}
        for name, solve in attacks.items()
    }


def _measure(name: str, x: Floats, scores: dict[int, Floats], rng: np.random.Generator) -> Finding:
    right, wholly = [], 0
    truth = x[list(scores)] != 0
    for hits, local in zip(truth, scores.values(), strict=True):
        order = rng.permutation(hits.size)
        mine = hits[order][top(local[order], int(hits.sum()))]
        wholly += int(mine.all())
        right.append(mine)
    counts = truth.sum(1)
    # A user with many features has many guesses, of which many are right by chance.
    chance = float((counts**2).sum() / (x.shape[1] * counts.sum()))
    return guesses(name, np.concatenate(right), chance, wholly=wholly / len(truth))


# What a user has, from equations ----------------------------------------------------------------


class Step(NamedTuple):
    """One request to a user, and its answer."""

    gradient: Floats | None  # [h] gradient that the user is to apply; None where it has none
    # [f, h] averaged weights that the user is to take over before that; NaN rows stay
    average: Floats | None
    latent: Floats  # [h] what it answers
    rate: float = 0.0  # of the step that applies the gradient


def least_squares(latent: Floats, start: Floats) -> Floats:
    """Return the shortest ``x`` with ``x W = latent``, ``[f]``."""
    result: Floats = np.linalg.lstsq(start.T.astype(float), latent.astype(float), rcond=None)[0]
    return result


def sparse_from_one(latent: Floats, start: Floats) -> Floats:
    """Return a non-negative ``x`` with ``x W`` nearest to a latent vector, ``[f]``."""
    # Non-negative least squares has at most as many features as the latent has numbers.
    result: Floats = nnls(start.T.astype(float), latent.astype(float), maxiter=SEARCH_STEPS)[0]
    return result


def sparse_from_sequence(
    start: Floats, settings: UserSettings, steps: Sequence[Step], values: Sequence[float]
) -> tuple[Floats, float]:
    """Return each feature's score from all equations of a sequence, and the features' value."""
    # start [f, h]: the first weights, without a bias
    steps = steps[: max(1, EQUATIONS // settings.latent_size)]
    shift = bias_course(settings, steps)
    target = (np.stack([step.latent for step in steps]) - shift).astype(float).ravel()
    fits = [_unexplained(equations(start, settings, steps, value), target) for value in values]
    value = values[int(np.argmin(fits))]
    matrix = equations(start, settings, steps, value)
    return nnls(matrix, target / value, maxiter=SEARCH_STEPS)[0], value


def equations(start: Floats, settings: UserSettings, steps: Sequence[Step], value: float) -> Floats:
    """Return the matrix that a user's features meet, ``[T h, f]``, if each feature is ``value``."""
    course = row_course(start, value, settings.weight_decay, steps)
    return course.transpose(0, 2, 1).reshape(-1, len(start))


def bias_course(settings: UserSettings, steps: Sequence[Step]) -> Floats:
    """Return the bias in every round, ``[T, h]``; zeros where users have none."""
    start = np.zeros((1, settings.latent_size))
    if not settings.bias:
        return start.repeat(len(steps), 0)
    # The last row of averaged weights is the bias's.
    last = [None if step.average is None else step.average[-1:] for step in steps]
    local = [step._replace(average=row) for step, row in zip(steps, last, strict=True)]
    return row_course(start, 1.0, settings.weight_decay, local)[:, 0]


def row_course(start: Floats, value: float, weight_decay: float, steps: Sequence[Step]) -> Floats:
    """Return the weights of features of size ``value`` in every round, ``[T, f, h]``."""
    weight, course = torch.from_numpy(start.astype(float).copy()), []
    adam = Adam([weight], weight_decay=weight_decay)
    for step in steps:
        if step.average is not None:
            new = torch.from_numpy(step.average[: len(weight)]).to(weight)
            weight.copy_(torch.where(new.isnan(), weight, new))
        if step.gradient is not None:
            slope = value * torch.from_numpy(step.gradient).to(weight)
            weight.grad, adam.lr = slope.expand_as(weight).clone(), step.rate
            adam.step()
        course.append(weight.numpy().copy())
    return np.stack(course)


def _unexplained(matrix: Floats, target: Floats) -> float:
    """Return the part of the target that the columns do not explain, 0 to 1."""
    size, space = np.linalg.eigh(matrix @ matrix.T)
    space = space[:, size > size[-1] * RANK_TOLERANCE**2]
    rest = target - space @ (space.T @ target)
    return float(np.linalg.norm(rest) / np.linalg.norm(target)) if target.any() else 0.0


# One layer for all ------------------------------------------------------------------------------


def common_scores(
    exchanges: Sequence[Exchange], drawn: Sequence[int], users: int, features: int
) -> tuple[Scores, list[Floats]]:
    """Score users' features by the equations of one round and of all rounds.

    Follow the layer by the sums, if they can be read; return the rounds' latent vectors, too.
    """
    # [n, h] without dropout, by the round of the layer's last step; and what the step was made of
    latents, steps = dict[int, Floats](), dict[int, tuple[Floats, float]]()
    settings = settings_of(exchanges)
    for request, reply in requests_of(exchanges, LatentRequest):
        advance, at = request.advance, request.advance.layer_round
        if advance.total is not None:
            steps.setdefault(at, (advance.total.copy(), advance.rate))
        if request.measured.size:
            here = latents.setdefault(at, np.zeros((users, settings.latent_size)))
            here[request.measured] = reply("measured")
    weight = shared_linear_weight(features, settings)
    adam, layers = Adam([weight], weight_decay=settings.weight_decay), list[Floats]()
    for at in sorted(latents):
        if at in steps:
            weight.grad, adam.lr = torch.from_numpy(steps[at][0]), steps[at][1]
            adam.step()
        layers.append(weight.numpy().astype(float).copy())
    result: Scores = {}
    how = "the layer followed" if steps else "the seed's first weights"
    seen = [latents[at] for at in sorted(latents)]
    for name, count in (("one round", 1), (f"{len(seen)} rounds", len(seen))):
        bias = np.concatenate([layer[features:].sum(0) for layer in layers[:count]])
        matrix = np.concatenate([layer[:features] for layer in layers[:count]], 1)
        targets = np.concatenate(seen[:count], 1) - bias
        for kind, solve in (("least squares", least_squares), ("sparse", sparse_from_one)):
            found = {user: solve(targets[user], matrix) for user in drawn}
            result[f"{kind}, {name}, by {how}"] = found
    return result, seen


def compare(latents: Sequence[Floats], x: Floats, rng: np.random.Generator) -> Finding:
    """Guess from the vectors which pairs of users have more common features than most pairs."""
    # latents: [n, h] of some rounds; x [n, f]
    rows = np.concatenate(latents, 1)
    chosen = rng.choice(len(x), min(COMPARED, len(x)), replace=False)
    pairs = np.triu_indices(chosen.size, 1)
    common = cosine_similarities((x[chosen] != 0).astype(float))[pairs]
    scores = cosine_similarities(rows[chosen])[pairs]
    truth: NDArray[np.bool_] = common > np.quantile(common, 0.95)
    return ranking("which users have features in common, from latents", scores, truth)


class RelayAudit(Audit[NFedGNNConfig]):
    """The attacks on a run of nFedGNN."""

    rounds = 10
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

    def supernodes(self, clients: int) -> int:
        """Put all users on one SuperNode: messages have a row for each user in any case."""
        return 1

    def attack(self, config: NFedGNNConfig, grid: RecordingGrid, method: object) -> list[Finding]:
        """Recover the features of some users, and compare users."""
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
        found = [_measure(f"features, {name}", x, one, rng) for name, one in scores.items()]
        return [*found, compare(latents, x, rng)]
