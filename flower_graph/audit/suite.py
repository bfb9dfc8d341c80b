"""The attacks, each written once on what a server sees of clients, whatever the method.

An attack judges its guesses by the truth about the clients. A guess reaches by chance an AUC of
0.5, or in ``features_found`` the share of true entries. A method's audit says which attacks apply.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.special import log_softmax

from flower_graph.audit.attacks import Finding, Floats, guesses, ranking
from flower_graph.ops.adam import Adam
from flower_graph.secure.align.blinded import canonical
from flower_graph.wire.arrays import IntArray

Truth = NDArray[np.bool_]
Scores = dict[str, dict[int, Floats]]  # each client's features, by the name of the attack
Near = Mapping[int, Floats]  # cosines of public nodes, [p, p], by client
Layers = Sequence[tuple[Floats, Floats]]  # weights and bias of each

EQUATIONS = 160  # more of them make the search slow, and hardly better
# Singular values below this share of the largest are drowned by float32's rounding.
RANK_TOLERANCE = 1e-6
SEARCH_STEPS = 6000  # of non-negative least squares
# Most pairs without an edge that are compared with pairs that have one
PAIRS = 20_000


# Features from latent vectors ---------------------------------------------------------------------
#
# A latent vector is ``x W + b``. ``W`` starts from a matrix that the server knows, and Adam moves a
# row of it by gradients that the server itself has sent. So a server that guesses that a feature is
# in ``x``, and its size, can compute the feature's row in every round, and each round adds as many
# linear equations for ``x`` as a latent vector has numbers. Without weight decay all rows would
# move alike, and later rounds would tell nothing. For a wrong size the equations have no solution.
#
# With one layer for all, a server that reads the sums of gradients steps as all clients do. Under
# masks it can use the first weights instead. A factorisation of all vectors into features and
# weights is no use: no factor tells which feature is which.


class Layer(NamedTuple):
    """A linear layer as every client starts it, and how Adam moves it."""

    start: Floats  # [f, h], with a bias its last row
    bias: bool
    weight_decay: float


class Step(NamedTuple):
    """One request to a client, and its answer."""

    gradient: Floats | None  # [h], or the layer's [f, h], that it is to apply; None without one
    # [f, h] averaged weights that it is to take over before that; NaN rows stay
    average: Floats | None
    latent: Floats  # [h] what it answers; or of all clients, [n, h]
    rate: float = 0.0  # of the step that applies the gradient
    average_round: int = 1  # a mean of a round is taken over once
    round: int = 0  # of the request; with one layer for all, of the layer's last step


def own_layers(layer: Layer, steps: Mapping[int, Sequence[Step]], sizes: Sequence[float]) -> Scores:
    """Score features where each client has a layer: by one latent, and by all and the gradients.

    ``sizes`` are those that a client's features, all equally large, may have.
    """
    layer = layer._replace(start=layer.start.astype(float))
    first = {client: own[0].latent[None] for client, own in steps.items()}
    found = _solved("from one latent, {}", layer, layer.start[None], first)
    every = {client: from_sequence(layer, own, sizes)[0] for client, own in steps.items()}
    return found | {"from all latents and gradients, sparse": every}


def joined(steps: Mapping[int, Sequence[Step]], clients: int) -> list[Step]:
    """Join all clients' steps of a round; a client that has none has a latent vector of zeros."""
    result = dict[int, Step]()
    for client, own in steps.items():
        for step in own:
            if step.round not in result:
                nothing = np.zeros((clients, step.latent.size))
                result[step.round] = step._replace(latent=nothing)
            result[step.round].latent[client] = step.latent
    return [result[number] for number in sorted(result)]


def common_layer(layer: Layer, steps: Sequence[Step], clients: Sequence[int]) -> Scores:
    """Score features where all clients have one layer, by the first round and by all rounds."""
    rows, latents = course(layer, 1.0, steps), np.stack([step.latent for step in steps])
    is_followed = any(step.gradient is not None for step in steps)
    how = "the layer followed" if is_followed else "the seed's first weights"
    result = Scores()
    for name, count in (("one round", 1), (f"{len(steps)} rounds", len(steps))):
        local = {client: latents[:count, client] for client in clients}
        result |= _solved(f"{{}}, {name}, by {how}", layer, rows[:count], local)
    return result


def features_found(scores: Scores, truth: Truth, rng: np.random.Generator) -> list[Finding]:
    """Judge each client's highest scores, as many as it has features; ties are drawn."""
    # truth [n, f]
    result = []
    for name, found in scores.items():
        right, known = [], truth[list(found)]
        for hits, local in zip(known, found.values(), strict=True):
            order = rng.permutation(hits.size)
            highest = np.argsort(-local[order], kind="stable")[: int(hits.sum())]
            right.append(hits[order][highest])
        counts = known.sum(1)
        # A case with many true entries has many guesses, of which many are right by chance.
        chance = float((counts**2).sum() / (known.shape[1] * counts.sum()))
        wholly = float(np.mean([one.all() for one in right]))
        result.append(guesses(f"features, {name}", np.concatenate(right), chance, wholly=wholly))
    return result


def course(layer: Layer, size: float, steps: Sequence[Step]) -> Floats:
    """Return the weights of features of one size, and the bias, in each round, ``[T, f, h]``."""
    weight, result, taken = torch.from_numpy(layer.start.copy()), [], 0
    sizes = torch.full_like(weight[:, :1], size)
    if layer.bias:
        sizes[-1] = 1
    adam = Adam([weight], weight_decay=layer.weight_decay)
    for step in steps:
        if step.average is not None and step.average_round > taken:
            new = torch.from_numpy(step.average).to(weight)
            weight.copy_(torch.where(new.isnan(), weight, new))
            taken = step.average_round
        if step.gradient is not None:
            slope = sizes * torch.from_numpy(step.gradient).to(weight)
            weight.grad, adam.lr = slope, step.rate
            adam.step()
        result.append(weight.numpy().copy())
    return np.stack(result)


def equations(layer: Layer, rows: Floats, latents: Floats) -> tuple[Floats, Floats]:
    """Return the equations that a client's features meet: a matrix ``[T h, f]`` and a vector."""
    # rows [T, f, h] of weights, then of a bias; latents [T, h]
    features = rows.shape[1] - layer.bias
    matrix = rows[:, :features].transpose(0, 2, 1).reshape(-1, features).astype(float)
    return matrix, (latents - rows[:, features:].sum(1)).ravel().astype(float)


# Each returns the ``x`` that is nearest to solving the equations, ``[f]``: the shortest, or one
# without negative numbers, which has at most as many features as there are equations.
SOLVERS: dict[str, Callable[[Floats, Floats], Floats]] = {
    "least squares": lambda matrix, target: np.linalg.lstsq(matrix, target, rcond=None)[0],
    "sparse": lambda matrix, target: nnls(matrix, target, maxiter=SEARCH_STEPS)[0],
}


def _solved(name: str, layer: Layer, rows: Floats, latents: Mapping[int, Floats]) -> Scores:
    local = {client: equations(layer, rows, latent) for client, latent in latents.items()}
    return {
        name.format(kind): {client: solve(*one) for client, one in local.items()}
        for kind, solve in SOLVERS.items()
    }


def from_sequence(
    layer: Layer, steps: Sequence[Step], sizes: Sequence[float]
) -> tuple[Floats, float]:
    """Return each feature's score from all equations of a sequence, and the features' size."""
    steps = steps[: max(1, EQUATIONS // layer.start.shape[1])]
    latents = np.stack([step.latent for step in steps])
    found = [equations(layer, course(layer, size, steps), latents) for size in sizes]
    best = int(np.argmin([_unexplained(*one) for one in found]))
    (matrix, target), size = found[best], sizes[best]
    return SOLVERS["sparse"](matrix, target / size), size


def _unexplained(matrix: Floats, target: Floats) -> float:
    """Return the part of the target that the columns do not explain, 0 to 1."""
    size, space = np.linalg.eigh(matrix @ matrix.T)
    space = space[:, size > size[-1] * RANK_TOLERANCE**2]
    rest = target - space @ (space.T @ target)
    return float(np.linalg.norm(rest) / np.linalg.norm(target)) if target.any() else 0.0


# Features, classes and members from a model -------------------------------------------------------


class Update(NamedTuple):
    """A client's model as it was sent to the client, and as it came back."""

    before: Layers
    after: Layers

    def moved(self, layer: int, part: int) -> Floats:
        """Return how the weights (part 0) or the bias (part 1) of a layer moved."""
        before, after = (one[layer][part].astype(float) for one in self)
        step: Floats = after - before
        return step


Updates = Sequence[Sequence[Update]]  # of each client in each round


def features_from_updates(attack: str, updates: Updates, x: Sequence[Floats]) -> Finding:
    """Guess which features a client's nodes have by how far a row of the first layer moved."""
    # x [n, f] of each client; moves are added up over the rounds
    steps = (np.stack([one.moved(0, 0) for one in local]) for local in updates)
    moved = [np.linalg.norm(local, axis=2).sum(0) for local in steps]
    return ranking(attack, moved, [(one != 0).any(0) for one in x])


def classes_from_updates(attack: str, updates: Updates, labels: Sequence[IntArray]) -> Finding:
    """Guess which classes a client trains on more than others do by the last layer's bias."""
    # labels of the nodes that each client trains on; both are relative to the other clients, since
    # what all have in common tells nothing about one.
    pulls = np.stack([np.stack([one.moved(-1, 1) for one in local]).sum(0) for local in updates])
    counts = np.stack([np.bincount(y[y >= 0], minlength=pulls.shape[1]) for y in labels])
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return ranking(attack, pulls - pulls.mean(0), shares > shares.mean(0))


def members_by_loss(
    attack: str,
    updates: Updates,
    x: Sequence[Floats],
    labels: Sequence[IntArray],
    is_member: Sequence[Truth],
) -> Finding:
    """Guess which labelled nodes a client trained on by their loss in its last model."""
    scores, truth = [], []
    for local, logits, y, mask in zip(updates, x, labels, is_member, strict=True):
        # The attacker has no edges, so it runs the layers as an MLP.
        for number, (weight, bias) in enumerate(local[-1].after):
            logits = np.maximum(logits, 0) if number else logits
            logits = logits @ weight.astype(float) + bias.astype(float)
        labelled = np.flatnonzero(y >= 0)
        scores.append(log_softmax(logits, 1)[labelled, y[labelled]])
        truth.append(mask[labelled])
    return ranking(attack, np.concatenate(scores), np.concatenate(truth))


# Members by names, pairs by vectors ---------------------------------------------------------------


def named(
    names: Sequence[set[bytes]], name_of: Callable[[bytes], bytes], candidates: Iterable[object]
) -> Floats:
    """Say which candidates' names are among the names that each client sent, ``[c, n]``."""
    known = [name_of(text) for text in canonical(candidates, "the server")]
    return np.array([[one in mine for one in known] for mine in names], float)


def larger(attack: str, seen: Sequence[int], sizes: Sequence[int]) -> Finding:
    """Guess which of two clients that differ in size is larger by what is seen of each."""
    first, second = np.triu_indices(len(sizes), 1)
    more, has_more = (np.array(one)[first] - np.array(one)[second] for one in (seen, sizes))
    differ = has_more != 0
    return ranking(attack, more[differ], has_more[differ] > 0)


def pairs(attack: str, scores: Floats, truth: Truth) -> Finding:
    """Guess by the scores of all pairs for which pairs something holds; both ``[n, n]``."""
    places = np.triu_indices(len(truth), 1)
    return ranking(attack, scores[places], truth[places])


class Graph(NamedTuple):
    """A graph whose public nodes all clients hold."""

    edges: Truth  # [n, n], symmetric
    public: IntArray  # [p] nodes, in the order of their embeddings
    owner: IntArray  # [n] the client that holds a node alone, -1 for others


def edges_of_public(near: Near, graph: Graph, rng: np.random.Generator) -> list[Finding]:
    """Guess edges of public nodes, and between which two a client has a private node."""
    (edges, public, owner), tried = graph, []
    inner = edges[np.ix_(public, public)]
    upper = np.triu(np.ones_like(inner), 1)

    def few(chosen: Truth) -> NDArray[np.int64]:
        found = np.argwhere(chosen & upper)
        is_few = len(found) <= PAIRS
        return found if is_few else found[rng.choice(len(found), PAIRS, replace=False)]

    edged = np.argwhere(inner & upper), few(~inner)
    # Where a client has a private node between two public nodes that nothing public joins
    apart, private = ~inner & ~_joined(inner), []
    for client in near:
        behind = _joined(edges[np.ix_(public, owner == client)])
        no = few(apart & ~behind)
        private.append((np.argwhere(apart & behind & upper), no))
    name = "between which public nodes a client has a private one (no public one, no edge)"
    cases = {"which public nodes have an edge": [edged] * len(near), name: private}
    for attack, each in cases.items():
        scores, truth = list[Floats](), list[bool]()
        for cosines, (yes, no) in zip(near.values(), each, strict=True):
            scores += [cosines[tuple(yes.T)], cosines[tuple(no.T)]]
            truth += [True] * len(yes) + [False] * len(no)
        tried.append(ranking(attack, np.concatenate(scores), truth))
    return tried


def _joined(edges: Truth) -> Truth:
    counts = edges.astype(np.float32)
    return (counts @ counts.T) > 0


def owners(attack: str, near: Near, graph: Graph) -> Finding:
    """Guess whose a private node is by where its public neighbours are nearest to each other."""
    clients = sorted(near)
    scores, truth = [], []
    for node in np.flatnonzero(graph.owner >= 0):
        beside = np.flatnonzero(graph.edges[node, graph.public])
        if beside.size < 2:
            continue
        first, second = np.triu_indices(beside.size, 1)
        mean = [float(near[c][beside[first], beside[second]].mean()) for c in clients]
        # Rounded, so that equal embeddings are a tie, not a coin toss of the last bit.
        scores.append(np.round(np.array(mean) - np.mean(mean), 9))
        truth.append([client == graph.owner[node] for client in clients])
    if not scores:
        raise ValueError("no private node has two public neighbours: nothing can be asked")
    return ranking(attack, np.stack(scores), np.array(truth))
