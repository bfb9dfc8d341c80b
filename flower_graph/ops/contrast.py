"""NT-Xent between the local and the shared embedding of the same node, client by client.

For a node ``j`` whose mean embedding the client received, with ``z = f(h)``, ``z~ = f(h~)`` and
cosine similarity ``s`` (FedSCem, equation 9):

``l_j = -log(exp(s(z_j, z~_j) / tau) / sum_k exp(s(z_j, k) / tau))``

where ``k`` runs over the client's local embeddings except ``z_j``, and over all its shared ones,
including ``z~_j``. Clients are never compared with each other. A large client's similarities are
computed block by block.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from flower_graph.ops.graph import Saved
from flower_graph.ops.grouped import group_sizes, grouped_linear, one_thread

# Similarities held at a time: few enough to stay in cache. Below some rows a product is slow.
BLOCK_NUMBERS, BLOCK_ROWS = 262_144, 8

# As `F.normalize`: what is shorter has no direction.
SHORTEST = 1e-12


def nt_xent(
    z: Tensor, z_shared: Tensor, place: Tensor, ptr: list[int], shared_ptr: list[int], tau: float
) -> Tensor:
    """Contrast every client's local embeddings with the shared ones of the same nodes."""
    # z [n, d], z_shared [s, d], place [s]
    local, shared = F.normalize(z, dim=1), F.normalize(z_shared, dim=1)
    anchors = local.index_select(0, place)
    return _NTXent.apply(anchors, local, shared, place, ptr, shared_ptr, tau)  # type: ignore[no-any-return, no-untyped-call]


def projected_nt_xent(
    h: Tensor,
    h_shared: Tensor,
    weight: Tensor,
    bias: Tensor,
    place: Tensor,
    ptr: list[int],
    shared_ptr: list[int],
    tau: float,
) -> Tensor:
    """Contrast embeddings by their projections ``z = h W + b``, each client with its own head."""
    # With ``a = [h, 1]``, ``V = [W; b]`` and ``G = V V^T`` is ``z_i . z_j = a_i G a_j``. A
    # projection longer than ``a`` is therefore never made: the similarities cost as much as without
    # a head.
    # h, h_shared [n, h], weight, bias [c, h, d]
    if weight.shape[2] <= weight.shape[1] + 1:  # z is no longer than a
        z, z_shared = (
            grouped_linear(rows, weight, bias, bounds)
            for rows, bounds in ((h, ptr), (h_shared, shared_ptr))
        )
        return nt_xent(z, z_shared, place, ptr, shared_ptr, tau)
    gram: Tensor = _Gram.apply(torch.cat([weight, bias[:, None]], dim=1))  # type: ignore[no-untyped-call]
    a, y, scale = _by_gram(h, gram, ptr)
    a_shared, _, scale_shared = _by_gram(h_shared, gram, shared_ptr)
    anchors = y.index_select(0, place) * scale.index_select(0, place)
    return _NTXent.apply(  # type: ignore[no-any-return, no-untyped-call]
        anchors, a * scale, a_shared * scale_shared, place, ptr, shared_ptr, tau
    )


def _by_gram(h: Tensor, gram: Tensor, ptr: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``a`` and ``a G``, ``[n, h + 1]``, and ``1 / |z|``, ``[n, 1]``."""
    # ``|z|^2 = a G a`` carries the rounding of sums as large as ``|a|^2 trace(G)``. A ``z`` below
    # that has no direction: 0 in place of ``1 / |z|`` makes all its similarities 0, as those of
    # zeros are in ``F.normalize``. So has one so short that ``1 / |z|^3``, of the slope, overflows:
    # the head of a client that shares no node decays to that.
    a = F.pad(h, (0, 1), value=1.0)
    y = grouped_linear(h, gram[:, :-1], gram[:, -1], ptr)
    square = (a * y).sum(1, keepdim=True)
    with torch.no_grad():
        trace = gram.diagonal(dim1=1, dim2=2).sum(1)
        largest = trace.repeat_interleave(torch.tensor(group_sizes(ptr), device=h.device))
        floor = torch.finfo(h.dtype).eps * a.square().sum(1) * largest
        none = square <= floor[:, None].clamp_min(SHORTEST**2)
    return a, y, square.masked_fill(none, torch.inf).rsqrt()


class _Gram(torch.autograd.Function):
    """``V V^T`` of a batch of matrices; autograd would need two products back instead of one."""

    @staticmethod
    def forward(ctx: Saved, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return torch.bmm(rows, rows.mT)

    @staticmethod
    def backward(ctx: Saved, *grads: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        return torch.bmm(grads[0] + grads[0].mT, rows)


class _NTXent(torch.autograd.Function):
    # Autograd would keep every client's matrix of similarities until the backward pass. Anchors
    # come apart from the local embeddings they belong to: with a Gram matrix, only they are times
    # ``G``.

    @staticmethod
    def forward(
        ctx: Saved,
        anchors: Tensor,
        local: Tensor,
        shared: Tensor,
        place: Tensor,
        ptr: list[int],
        shared_ptr: list[int],
        tau: float,
    ) -> Tensor:
        sizes, counts = group_sizes(ptr), group_sizes(shared_ptr)
        lengths, tensors = (counts, sizes, counts), (anchors, local, shared)
        loss, grads = local.new_zeros(len(sizes)), [torch.zeros_like(t) for t in tensors]
        pieces = [
            tensor.split(length)
            for tensor, length in zip((*tensors, *grads), lengths * 2, strict=True)
        ]
        starts = torch.tensor(ptr[:-1], device=place.device)
        rows_of = place - starts.repeat_interleave(torch.tensor(counts, device=place.device))
        compared = (anchors / tau).split(counts)
        with one_thread(len(sizes) > 1):
            parts = zip(rows_of[:, None].split(counts), compared, *pieces[1:], strict=True)
            for client, (rows, *vectors) in enumerate(parts):
                if rows.numel():
                    loss[client] = _contrast_one(rows, *vectors)
        grads[0].div_(tau)
        ctx.save_for_backward(*grads)
        ctx.lengths = lengths
        return loss

    @staticmethod
    def backward(
        ctx: Saved, *grads: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        weights = (
            grads[0].repeat_interleave(torch.tensor(n, device=grads[0].device))[:, None]
            for n in ctx.lengths
        )
        anchors, local, shared = (
            grad * weight for grad, weight in zip(ctx.saved_tensors, weights, strict=True)
        )
        return anchors, local, shared, None, None, None, None


def _contrast_one(
    rows: Tensor,
    compared: Tensor,
    own: Tensor,
    means: Tensor,
    anchor_grad: Tensor,
    own_grad: Tensor,
    mean_grad: Tensor,
) -> Tensor:
    """Return one client's loss and write its gradients, the anchors' times ``tau``."""
    # rows [s, 1], compared [s, d] anchors / tau, means [s, d], own [n, d]
    n, s = len(own), len(means)
    keys = torch.cat([own, means])
    # Turned: of few numbers, such as one for each class, BLAS takes a quarter of the time.
    grad, losses = keys.new_zeros(keys.shape[1], n + s), []
    block = max(BLOCK_ROWS, BLOCK_NUMBERS // (n + s))
    for begin in range(0, s, block):
        end = min(begin + block, s)
        anchors = compared[begin:end]
        logits = anchors @ keys.T  # [b, n + s]
        logits.scatter_(1, rows[begin:end], -torch.inf)
        slope = torch.log_softmax(logits, dim=1)
        positive = slope[:, n + begin : n + end].diagonal()  # each anchor's own mean
        losses.append(positive.sum())
        slope.exp_()  # the loss's slope by the logits
        positive.sub_(1)
        grad.addmm_(anchors.T, slope)
        anchor_grad[begin:end] = (keys.T @ slope.T).T
    own_grad.copy_(grad[:, :n].T)
    mean_grad.copy_(grad[:, n:].T)
    return -torch.stack(losses).sum()
