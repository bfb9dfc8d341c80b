"""Features in signed buckets."""

from __future__ import annotations

import pytest
import torch

from flower_graph.data.features import sketched


@pytest.mark.parametrize("sparse", [False, True])
def test_each_feature_has_one_bucket_and_one_sign(sparse: bool) -> None:
    eye = torch.eye(200)
    hashed = sketched(eye.to_sparse_csr() if sparse else eye, 8, seed=3)
    assert (hashed.abs().sum(1) == 1).all() and (hashed != 0).any(0).all()
    assert {-1.0, 1.0} == set(hashed[hashed != 0].tolist())
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(sketched(x, 8, seed=3), x @ hashed, atol=1e-6)
    assert not torch.equal(sketched(eye, 8, seed=4), hashed)
