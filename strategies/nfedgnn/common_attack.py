"""nFedGNN with one first layer: find a user's features, and users with common features.

A server that reads the sums of gradients knows the layer ``W`` of every round: ``W`` starts from
the seed, and the server can step as all users do. Then each round gives as many linear equations
for a user's features as a latent vector has numbers, ``x W_t = x'_t``.

Under masks the server does not know ``W``. It can use the seed's first weights instead. It can also
compare users, because all latent vectors are maps of features by the same ``W``. A factorisation of
all vectors into features and weights is no use to the server: no factor tells which feature is
which word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls

from flower_graph.audit.attacks import Exchange, array_of, config_of, of_kind
from flower_graph.audit.scores import Finding, Floats, cosines, ranking
from flower_graph.ops.adam import Adam
from flower_graph.strategies.nfedgnn.common_messages import SETTINGS
from flower_graph.strategies.nfedgnn.users import shared_linear_weight
from flower_graph.wire import keys
from flower_graph.wire.arrays import unpack_integers

SEARCH_STEPS = 6000  # of non-negative least squares
COMPARED = 300  # users that are compared with each other


class CommonSeen(NamedTuple):
    """The contents of the messages of a run with one layer."""

    latents: dict[int, Floats]  # [n, h] without dropout, by the round of the layer's last step
    layers: dict[int, Floats]  # [f, h] the layer of each of these rounds, as the server has it
    reads_sums: bool  # whether the server has followed the layer, or guesses it


def read_common(exchanges: Sequence[Exchange], users: int, features: int) -> CommonSeen:
    """Follow the layer by the sums, if they can be read, and collect latent vectors."""
    latents, steps, settings = dict[int, Floats](), dict[int, tuple[Floats, float]](), None
    for one in of_kind(exchanges, "train"):
        config = config_of(one.request)
        settings, at = SETTINGS.from_config(config), int(config["layer-round"])
        if config["has-total"] and at not in steps:
            total = array_of(one.request, "total", "gradient").copy()
            steps[at] = total, float(config["learning-rate"])
        if "measured" in config:
            numbers = unpack_integers(config["measured"], "measured")
            here = latents.setdefault(at, np.zeros((users, settings.latent_size)))
            here[numbers] = array_of(one.reply, keys.ARRAYS, "measured")
    if settings is None or not latents:
        raise ValueError("no latent vector was recorded; at least one round is needed")
    weight = shared_linear_weight(features, settings)
    adam, layers = Adam([weight], weight_decay=settings.weight_decay), dict[int, Floats]()
    for at in sorted(latents):
        if at in steps:
            weight.grad, adam.lr = torch.from_numpy(steps[at][0]), steps[at][1]
            adam.step()
        layers[at] = weight.numpy().astype(float).copy()
    return CommonSeen(latents, layers, bool(steps))


def scores_of(
    seen: CommonSeen, users: Sequence[int], features: int
) -> dict[str, dict[int, Floats]]:
    """Score users' features by the equations of one round and of all rounds."""
    first, *_ = sorted(seen.latents)
    every = sorted(seen.latents)
    result: dict[str, dict[int, Floats]] = {}
    how = "the layer followed" if seen.reads_sums else "the seed's first weights"
    for name, rounds in (("one round", [first]), (f"{len(every)} rounds", every)):
        bias = [seen.layers[at][features:].sum(0) for at in rounds]
        matrix = np.concatenate([seen.layers[at][:features] for at in rounds], 1)
        target = {
            user: np.concatenate([seen.latents[at][user] for at in rounds]) - np.concatenate(bias)
            for user in users
        }
        least = np.linalg.pinv(matrix.T)
        result[f"least squares, {name}, by {how}"] = {u: least @ v for u, v in target.items()}
        result[f"sparse, {name}, by {how}"] = {
            user: nnls(matrix.T, value, maxiter=SEARCH_STEPS)[0] for user, value in target.items()
        }
    return result


def compare(latents: Sequence[Floats], x: Floats, rng: np.random.Generator) -> Finding:
    """Guess from the vectors which pairs of users have more common features than most pairs."""
    # latents: [n, h] of some rounds; x [n, f]
    rows = np.concatenate(latents, 1)
    chosen = rng.choice(len(x), min(COMPARED, len(x)), replace=False)
    pairs = np.triu_indices(chosen.size, 1)
    common = cosines((x[chosen] != 0).astype(float))[pairs]
    scores = cosines(rows[chosen])[pairs]
    truth: NDArray[np.bool_] = common > np.quantile(common, 0.95)
    return ranking("which users have features in common, from latents", scores, truth)
