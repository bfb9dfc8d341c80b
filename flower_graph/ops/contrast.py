"""NT-Xent between the local and the shared embedding of the same node, client by client.

For a node ``j`` whose mean embedding the client received, with ``z = f(h)``, ``z~ = f(h~)`` and
cosine similarity ``s`` (FedSCem, equation 9):

``l_j = -log(exp(s(z_j, z~_j) / tau) / sum_k exp(s(z_j, k) / tau))``

where ``k`` runs over the client's local embeddings but ``z_j`` itself, and over all its shared
ones, ``z~_j`` included. No client meets another one's nodes, and a large client's matrix of
similarities is made a block at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flower_graph.ops.grouped import group_sizes
from flower_graph.ops.threads import one_thread

# Similarities held at a time: few enough to stay in cache.
BLOCK_NUMBERS = 262_144


def nt_xent(
    z: Tensor, z_shared: Tensor, place: Tensor, ptr: list[int], shared_ptr: list[int], tau: float
) -> Tensor:
    """Contrast every client's local embeddings with the shared ones of the same nodes.

    Parameters
    ----------
    z : Tensor
        ``[n, d]`` local metric embeddings of all clients, client by client.
    z_shared : Tensor
        ``[s, d]`` metric embeddings of the shared means, client by client.
    place : Tensor
        ``[s]`` row of ``z`` that belongs to the same node, rising.
    ptr, shared_ptr : list of int
        ``c + 1`` bounds of the clients in ``z`` and in ``z_shared``.
    tau : float
        Temperature, above 0.

    Returns
    -------
    Tensor
        ``[c]`` sum over each client's shared nodes (equation 10), 0 for a client without any;
        gradients flow to ``z`` and ``z_shared``.
    """
    local, shared = F.normalize(z, dim=1), F.normalize(z_shared, dim=1)
    return _NTXent.apply(local, shared, place, ptr, shared_ptr, tau)  # type: ignore[no-any-return, no-untyped-call]


class _NTXent(torch.autograd.Function):
    """The losses and their gradients in one pass.

    Autograd would keep every client's matrix of similarities until the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        shared: Tensor,
        place: Tensor,
        ptr: list[int],
        shared_ptr: list[int],
        tau: float,
    ) -> Tensor:
        sizes, counts = group_sizes(ptr), group_sizes(shared_ptr)
        loss, grads = (
            local.new_zeros(len(sizes)),
            (torch.zeros_like(local), torch.zeros_like(shared)),
        )
        parts = zip(
            local.split(sizes),
            shared.split(counts),
            place.split(counts),
            grads[0].split(sizes),
            grads[1].split(counts),
            strict=True,
        )
        with one_thread(len(sizes)):
            for client, (own, means, rows, grad_own, grad_means) in enumerate(parts):
                if rows.numel():
                    loss[client], grad = _contrast_one(own, means, rows - ptr[client], tau)
                    grad_own.copy_(grad[: own.shape[0]])
                    grad_means.copy_(grad[own.shape[0] :])
        ctx.save_for_backward(*grads)
        ctx.sizes = sizes, counts
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        weights = (
            grads[0].repeat_interleave(torch.tensor(sizes, device=grads[0].device))[:, None]
            for sizes in ctx.sizes
        )
        local, shared = (
            grad * weight for grad, weight in zip(ctx.saved_tensors, weights, strict=True)
        )
        return local, shared, None, None, None, None


def _contrast_one(own: Tensor, means: Tensor, rows: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return one client's loss and its gradient.

    Parameters
    ----------
    own, means : Tensor
        ``[n, d]`` local and ``[s, d]`` shared embeddings, both of length 1.
    rows : Tensor
        ``[s]`` the row of ``own`` that belongs to each of ``means``, each once.
    tau : float
        Temperature.

    Returns
    -------
    tuple of Tensor and Tensor
        The sum over ``rows``, and its gradient by ``own`` and ``means``, ``[n + s, d]``.
    """
    keys = torch.cat([own, means])
    loss, grad = keys.new_zeros(()), torch.zeros_like(keys)
    block = max(1, BLOCK_NUMBERS // keys.shape[0])
    for begin in range(0, rows.numel(), block):
        row = rows[begin : begin + block]
        number = torch.arange(row.numel(), device=row.device)
        positive = number + (own.shape[0] + begin)
        anchors = own[row] / tau
        logits = anchors @ keys.T  # [b, n + s]
        logits[number, row] = -torch.inf
        log_share = torch.log_softmax(logits, dim=1)
        loss -= log_share[number, positive].sum()
        slope = log_share.exp_()  # of the loss by the logits
        slope[number, positive] -= 1
        grad.addmm_(slope.T, anchors)
        grad.index_add_(0, row, slope @ keys, alpha=1 / tau)
    return loss, grad
