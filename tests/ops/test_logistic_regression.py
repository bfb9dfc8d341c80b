"""Logistic regression: against scikit-learn's, dense and sparse."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from flower_graph.ops.logistic_regression import fit, scores


@pytest.mark.parametrize(("strength", "is_sparse"), [(0.1, False), (1.0, True)])
def test_weights_are_those_of_scikit_learn(strength: float, is_sparse: bool) -> None:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(90, 12, generator=rng) * (torch.rand(90, 12, generator=rng) < 0.4)
    y = (x @ torch.randn(12, 4, generator=rng) + torch.randn(90, 4, generator=rng)).argmax(1)
    theirs = LogisticRegression(C=strength, tol=1e-8, max_iter=1000).fit(x.numpy(), y.numpy())
    given = x.to_sparse_csr() if is_sparse else x
    ours = fit(given, y, 4, strength, steps=500, tolerance=1e-6)
    expected = torch.from_numpy(theirs.coef_.T).float()
    torch.testing.assert_close(ours[:-1], expected, atol=5e-3, rtol=5e-3)
    bias = ours[-1] - ours[-1].mean()  # any number may be added to all
    torch.testing.assert_close(
        bias, torch.from_numpy(theirs.intercept_).float(), atol=5e-3, rtol=5e-3
    )
    short = scores(given, fit(given, y, 4, strength)).argmax(1)  # as baselines fit it
    assert (short == torch.from_numpy(theirs.predict(x.numpy()))).float().mean() >= 0.98
