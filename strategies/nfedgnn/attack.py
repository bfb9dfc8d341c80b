"""The audit of nFedGNN: which features a user has, from its latent vectors and its gradients."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from flower_graph.audit import attacks, suite
from flower_graph.data.sources.datasets import cached_data
from flower_graph.ops.peers import cosine_similarities
from flower_graph.strategies.nfedgnn.algorithm import shared_linear_weight
from flower_graph.strategies.nfedgnn.client import EnrolmentRequest, LatentRequest, RelayRequest
from flower_graph.strategies.nfedgnn.config import AVERAGED, OWN, SUMMED, NFedGNNConfig
from flower_graph.wire import keys

LAYER, STEPS = "layer", "steps"
# A bag of words: how many different ones a user may have, if its features sum to one
MOST_WORDS = 40
USERS = 25  # that are attacked in a run: each takes a second
COMPARED = 300  # users that are compared with each other


class RelayAudit(attacks.Audit[NFedGNNConfig]):
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
        # Weights that are averaged get no noise: it is refused with them.
        return [[], [attacks.NO_NOISE], *(noisy if config.strategy.share == OWN else ())]

    def label(self, config: NFedGNNConfig) -> str:
        share, label = config.strategy.share, super().label(config)
        if share == SUMMED:
            share = f"{share}, {config.strategy.aggregation} sums"
        return label if share == OWN else f"{share}, {label}"

    def view(self, message: attacks.Exchange) -> Iterator[tuple[str, int, Any]]:
        entries = attacks.config_of(message.request)
        if message.kind == "query":
            settings = EnrolmentRequest.from_config(entries).settings
            features = attacks.config_of(message.reply)["weight-shape"][0] - settings.bias
            start = shared_linear_weight(features, settings).numpy()
            yield LAYER, attacks.SERVER, suite.Layer(start, settings.bias, settings.weight_decay)
        if message.kind != "train":
            return
        records = message.request.array_records.values()
        arrays = [array.numpy() for record in records for array in record.values()]
        reply = partial(attacks.array_of, message.reply, keys.ARRAYS)
        if keys.GRADIENT_ROUND in entries:  # each user has a layer of its own
            own = RelayRequest.from_numpy(arrays, entries)
            rounds = own.average_round, own.server_round
            rows = own.users.tolist(), own.gradient_round, own.gradient, reply("relay")
            for user, is_given, gradient, latent in zip(*rows, strict=True):
                given = gradient if is_given else None
                yield STEPS, user, suite.Step(given, own.average, latent, own.rate, *rounds)
        else:
            common = LatentRequest.from_numpy(arrays, entries)
            layer, total = common.advance, common.advance.total
            total = None if total is None else total.copy()
            users = common.measured.tolist()
            for user, latent in zip(users, reply("measured") if users else (), strict=True):
                step = suite.Step(total, None, latent, layer.rate, round=layer.layer_round)
                yield STEPS, user, step

    def findings(
        self, config: NFedGNNConfig, seen: attacks.Seen, method: object
    ) -> list[attacks.Finding]:
        x, rng = cached_data(config).x.to_dense().numpy(), attacks.audit_rng(config)
        drawn = attacks.users_drawn(x, USERS, rng)
        ((layer,),), steps = seen.of(LAYER), seen[STEPS]
        rounds = suite.joined(steps, len(x))
        if config.strategy.share == SUMMED:
            scores = suite.common_layer(layer, rounds, drawn)
        else:
            rounds = rounds[:1]
            is_scaled = "row" in config.data.features
            sizes = [1 / count for count in range(1, MOST_WORDS + 1)] if is_scaled else [1.0]
            own = {user: steps[user] for user in drawn if user in steps}
            scores = suite.own_layers(layer, own, sizes)
        found = suite.features_found(scores, x != 0, rng)
        # Which pairs of users have more common features than most pairs
        chosen = rng.choice(len(x), min(COMPARED, len(x)), replace=False)
        common = cosine_similarities((x[chosen] != 0).astype(float))
        most = np.quantile(common[np.triu_indices(chosen.size, 1)], 0.95)
        rows = np.concatenate([one.latent for one in rounds], 1)[chosen]
        name = "which users have features in common, from latents"
        return [*found, suite.pairs(name, cosine_similarities(rows), common > most)]
