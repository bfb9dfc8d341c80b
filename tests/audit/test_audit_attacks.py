"""Attacks on small runs: those that must succeed, and those that must do no better than a guess."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from audit_helpers import audited, by_words, is_a_guess
from federation import ALL, Setup

from flower_graph.apps.cli.audit import _deviating_run
from flower_graph.audit.deviating import NOTES, Deviation, all_notes
from flower_graph.audit.scores import Finding, guess_variance, guesses, ranking
from flower_graph.method.registry import method_of
from flower_graph.strategies.fedgls.attack import Models, attack


def test_users_words_are_found_where_nothing_protects_them(tmp_path: Path) -> None:
    found = audited(tmp_path, "nfedgnn")
    whole = by_words(found, "all latents")
    assert whole.success > 0.9
    assert whole.detail["wholly"] > 0.8
    assert whole.chance == pytest.approx(0.1, abs=0.02)  # 4 of 40 features


def test_users_words_stay_hidden_behind_noise(tmp_path: Path) -> None:
    for finding in audited(tmp_path, "nfedgnn", "privacy.epsilon=1").values():
        assert finding.success < finding.chance or is_a_guess(finding), finding.attack


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
    rng, (classes, width, count) = np.random.default_rng(0), (3, 4, 12)
    models, graphs = [], []
    for client in range(3):
        train = torch.arange(count) < 6
        # A node that was trained on has a feature of its own that makes its class sure.
        x = torch.where(train[:, None], torch.tensor([1.0, 1.0, 0.0]), torch.zeros(3))
        weight, bias = np.zeros((width, classes)), np.zeros(classes)
        weight[:, client], bias[client] = 1.0, 0.1
        rest = np.concatenate([np.zeros(width), weight.ravel(), bias])
        first = np.stack([rng.normal(size=(3, width)), np.ones((3, width))])
        models.append(Models(first[None], np.stack([0 * rest, rest])[None]))
        graphs.append(SimpleNamespace(x=x, y=torch.full((count,), client), train_mask=train))
    _, trains_more, trained_on = attack(models, graphs, classes)
    assert trains_more.success == trained_on.success == 1.0


def test_embeddings_show_links_and_noise_hides_them(tmp_path: Path) -> None:
    clear, noisy = audited(tmp_path, "ppfl"), audited(tmp_path, "ppfl", "privacy.epsilon=1")
    # The third attack has 35 private nodes here, too few to tell a guess from a weak success.
    for words, least in (("have an edge", 0.8), ("has a private one", 0.65)):
        assert by_words(clear, words).success > least
        assert is_a_guess(by_words(noisy, words)), noisy


def test_the_secure_form_does_not_show_whose_a_private_node_is(tmp_path: Path) -> None:
    found = audited(tmp_path, "ppfl", "strategy.alignment=secure")
    assert by_words(found, "whose a private node is").success == 0.5


def test_areas_count_ties_half_and_need_both_kinds_of_cases() -> None:
    assert ranking("", [1.0, 2.0, 2.0, 3.0], [False, True, False, True]).success == 3.5 / 4
    for truth in ([True, True], [False, False]):
        with pytest.raises(ValueError, match="of 2 cases"):
            ranking("", [1.0, 2.0], truth)


def test_a_guess_strays_as_far_as_it_is_said_to() -> None:
    rng = np.random.default_rng(1)
    truth = np.arange(60) < 20
    drawn = [ranking("", rng.random(60), truth) for _ in range(2000)]
    spread = np.std([one.success for one in drawn])
    assert spread == pytest.approx(guess_variance(drawn[0]) ** 0.5, rel=0.06)


def test_findings_count_their_cases() -> None:
    found = ranking("a", [3, 1, 2], [True, False, False], more=0.5)
    assert (found.success, found.chance, found.n, found.true) == (1.0, 0.5, 3, 1)
    assert found.detail == {"more": 0.5}
    guessed = guesses("b", [True, False, True, True], 0.1)
    assert (guessed.success, guessed.chance, guessed.n) == (0.75, 0.1, 4)
    with pytest.raises(ValueError, match="guessed"):
        guesses("b", [], 0.1)


LIES = {"fedscem": 5, "deepwalk, secure": 3, "fedscem, plain": 0, "deepwalk": 0, "nfedgnn": 0}


def tried(setup: Setup, words: str = "") -> list[Finding]:
    """Let the server of a run lie in all ways whose name has these words."""
    config = setup.load()
    method = method_of(config)
    lies = [one for one in method.audit().deviations(config, method) if words in one.name]
    return [_deviating_run(config, lie, setup.supernodes) for lie in lies]


@pytest.mark.parametrize("name", LIES)
def test_what_hides_something_is_attacked(name: str) -> None:
    config = ALL[name].load()
    method = method_of(config)
    assert len(method.audit().deviations(config, method)) == LIES[name]


@pytest.mark.parametrize(
    "name", ["fedscem", pytest.param("deepwalk, secure", marks=pytest.mark.slow)]
)
def test_two_stories_about_who_dropped_out_open_no_vector(name: str) -> None:
    (found,) = tried(ALL[name], "server: different stories")
    assert (found.success, found.n) == (0, ALL[name].supernodes)


@pytest.mark.parametrize(
    ("words", "success"),
    [("only one", 0), ("a threshold of 1", 0), ("by answers", 1), ("that it chose", 1)],
)
def test_clients_see_through_lies_about_dropouts_and_not_about_an_alignment(
    words: str, success: int
) -> None:
    (found,) = tried(ALL["fedscem"], words)
    assert found.success == success


UNTRUSTED = ALL["fedscem"].with_("strategy.dropout=0.3", "strategy.trust=malicious-server")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "lies"), [(UNTRUSTED, 5), (ALL["deepwalk, secure, untrusted"], 3)]
)
def test_clients_that_do_not_trust_the_server_show_it_nothing(setup: Setup, lies: int) -> None:
    """Each lie is told (else `_deviating_run` fails), and opens no vector and no identity."""
    found = tried(setup)
    assert len(found) == lies
    assert all(one.success <= one.chance for one in found), found


def test_a_run_that_ends_before_its_server_lies_shows_nothing() -> None:
    lie = Deviation()
    lie.name, lie.patch = "never", lambda strategy: None
    setup = ALL["fedscem"]
    with pytest.raises(AssertionError, match="before"):
        _deviating_run(setup.load(), lie, setup.supernodes)


def test_readers_are_told_that_the_server_lied() -> None:
    assert all_notes(["a"], ["who has what"]) == ["a"]
    assert all_notes(["a"], ["deviating server: x"]) == ["a", *NOTES]
