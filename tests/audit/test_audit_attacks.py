"""Attacks on small runs: those that must succeed, and those that must do no better than a guess."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from audit_helpers import audited, by_words, is_a_guess

from flower_graph.audit.scores import Finding, auc
from flower_graph.strategies.fedgls import attack as models
from flower_graph.strategies.fedgls.attack import Sent, Truth
from flower_graph.strategies.fedscem import attack as ego


def slack_of(finding: Finding) -> float:
    """Return four standard deviations of a guess: of a share, or of an AUC (Mann-Whitney)."""
    if finding.measure == "AUC":
        variance = (finding.n + 1) / (12 * finding.true * (finding.n - finding.true))
    else:
        variance = finding.chance * (1 - finding.chance) / finding.n
    return 4 * math.sqrt(variance)


def test_users_words_are_found_where_nothing_protects_them(tmp_path: Path) -> None:
    found = audited(tmp_path, "nfedgnn")
    whole = by_words(found, "all latents")
    assert whole.success > 0.9
    assert whole.detail["wholly"] > 0.8
    assert whole.chance == pytest.approx(0.1, abs=0.02)  # 4 of 40 features


def test_users_words_stay_hidden_behind_noise(tmp_path: Path) -> None:
    for finding in audited(tmp_path, "nfedgnn", "privacy.epsilon=1").values():
        assert finding.success < finding.chance + slack_of(finding), finding.attack


def test_with_one_layer_for_all_words_are_found_unless_sums_are_masked(tmp_path: Path) -> None:
    how = ["strategy.share=summed", "strategy.learning_rate=0.05"]
    found = audited(tmp_path, "nfedgnn", *how)
    assert by_words(found, "sparse, 10 rounds").success > 0.9
    assert by_words(found, "have features in common").success > 0.7
    hidden = audited(tmp_path, "nfedgnn", *how, "strategy.aggregation=masked")
    for words in ("sparse, 10 rounds", "least squares, 10 rounds"):
        guess = by_words(hidden, words)
        # Far from the 0.9 above; words of one user are guessed together, so a guess varies much
        assert guess.success < guess.chance + 0.3, guess
    assert by_words(hidden, "have features in common").success > 0.7, "the Gram matrix stays"


def test_plain_sums_show_who_shares_nodes_and_blinded_points_no_node(tmp_path: Path) -> None:
    found = audited(tmp_path, "fedscem", "strategy.aggregation=plain")
    assert by_words(found, "common, from the counts").success == 1.0
    assert by_words(found, "common, from the embeddings").success > 0.9
    assert by_words(found, "holds which node, from the alignment").success == 0.5


def test_masked_sums_show_nobody(tmp_path: Path) -> None:
    found = audited(tmp_path, "fedscem")
    for words in ("common, from the counts", "common, from the embeddings"):
        assert is_a_guess(by_words(found, words)), by_words(found, words)
    assert by_words(found, "common, from the alignment").success == 0.5


def test_open_alignments_show_every_node(tmp_path: Path) -> None:
    found = audited(tmp_path, "fedscem", "strategy.alignment=plain", "strategy.aggregation=plain")
    assert by_words(found, "holds which node, from the alignment").success == 1.0
    assert by_words(found, "common, from the alignment").success == 1.0


def test_models_show_features_and_noise_hides_them(tmp_path: Path) -> None:
    assert by_words(audited(tmp_path, "fedgls"), "which features").success == 1.0
    hidden = audited(tmp_path, "fedgls", "privacy.epsilon=1")
    assert is_a_guess(by_words(hidden, "which features")), hidden


def test_a_models_bias_shows_classes_and_its_losses_training_nodes() -> None:
    rng = np.random.default_rng(0)
    classes, width, count = 3, 4, 12
    sent, truth = {}, {}
    for client in range(3):
        y = np.full(count, client)
        train = np.arange(count) < 6
        # A node that was trained on has a feature of its own that makes its class sure.
        x = np.where(train[:, None], 1.0, 0.0) * np.ones((count, 2))
        first = np.ones((2, width))
        weight = np.zeros((width, classes))
        weight[:, client] = 1.0
        bias = np.zeros(classes)
        bias[client] = 0.1
        rest = np.concatenate([np.zeros(width), weight.ravel(), bias])
        start = Sent((rng.normal(size=(2, width)), first), (np.zeros_like(rest), rest))
        sent[client] = [start]
        truth[client] = Truth(np.concatenate([x, np.zeros((count, 0))], 1), y, train)
    confidence = [models._confidence(sent[c][0], truth[c], classes) for c in range(3)]
    masks = np.concatenate([truth[c].train for c in range(3)])
    assert auc(np.concatenate(confidence), masks) == 1.0
    pulls = np.stack([models._class_pull(sent[c], classes) for c in range(3)])
    assert (pulls.argmax(1) == np.arange(3)).all()


def test_embeddings_show_links_and_noise_hides_them(tmp_path: Path) -> None:
    clear, noisy = audited(tmp_path, "ppfl"), audited(tmp_path, "ppfl", "privacy.epsilon=1")
    # The third attack has 35 private nodes here, too few to tell a guess from a weak success.
    for words, least in (("have an edge", 0.8), ("has a private one", 0.65)):
        assert by_words(clear, words).success > least
        assert is_a_guess(by_words(noisy, words)), noisy


def test_the_secure_form_does_not_show_whose_a_private_node_is(tmp_path: Path) -> None:
    found = audited(tmp_path, "ppfl", "strategy.alignment=secure")
    assert by_words(found, "whose a private node is").success == 0.5


def test_words_of_a_ring_are_read_around_zero() -> None:
    words = np.array([1, 2**32 - 1], np.uint32)
    assert ego._centred(words).tolist() == [1.0, -1.0]
    assert ego._centred(np.array([0.5])).tolist() == [0.5]
