from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_graph.ops.wide import wide_linear, wide_rows


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
def test_equals_dense_products_with_their_gradients(
    sizes: list[tuple[int, int]], seed: int
) -> None:
    """Clients without real or without generated nodes are among them."""
    draw = torch.Generator().manual_seed(seed)
    ptr, made_ptr = ([0, *accumulate(part)] for part in zip(*sizes, strict=True))
    x = torch.rand(ptr[-1], 5, generator=draw) * (torch.rand(ptr[-1], 5, generator=draw) < 0.4)
    made = torch.rand(made_ptr[-1], 5, generator=draw).requires_grad_()
    weight = torch.rand(len(sizes), 5, 2, generator=draw).requires_grad_()
    parts = [x[a:b] @ weight[c] for c, (a, b) in enumerate(pairwise(ptr))]
    parts += [made[a:b] @ weight[c] for c, (a, b) in enumerate(pairwise(made_ptr))]
    dense = torch.cat(parts)
    found = wide_linear(wide_rows(x, ptr), made, weight, made_ptr)
    torch.testing.assert_close(found, dense)
    wanted = torch.rand(dense.shape, generator=draw)
    for one, other in zip(
        torch.autograd.grad(found, (made, weight), wanted),
        torch.autograd.grad(dense, (made, weight), wanted),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
