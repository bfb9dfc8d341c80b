"""Active rows: a linear map a user, stored only where the user's features are not zero.

A user's first layer is ``x_i W_i``. A row of ``W_i`` whose feature is zero in ``x_i`` never touches
the output and gets no gradient, so leaving it out changes no output of any elementwise optimiser.
On Cora this turns 2,708 matrices of 1433 x 16 into 49,216 rows.

The users' rows are concatenated. A bias is a further feature with value 1 for every user.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, starmap
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.ops.adam import BETAS, EPS, Rates, adam_rows_
from flower_graph.ops.graph import pointers, row_entries, weighted_sums

# Numbers (rows times h) that a step handles at a time: small enough that the working tensors stay
# in cache, large enough that threads have something to share.
BLOCK_NUMBERS = 524_288
VECTOR = 16  # float32 numbers of the widest vectors: so many rows are a whole number of them


class ActiveRows(NamedTuple):
    """Which rows each user stores, and the feature value that multiplies each."""

    ptr: Tensor  # [n + 1] int32; user i owns rows ptr[i] to ptr[i + 1]
    feature: Tensor  # [r] int32; the feature that a row belongs to
    value: Tensor  # [r] float32; the user's value of that feature
    num_features: int  # Rows of a full matrix, bias included

    @property
    def num_users(self) -> int:
        return self.ptr.numel() - 1

    @property
    def user(self) -> Tensor:
        """The user that owns each row, int32 ``[r]``, made anew at each call."""
        return self.owners(slice(0, self.num_users), self.feature.numel())

    def owners(self, users: slice, count: int) -> Tensor:
        """Return the user that owns each row of ``users``, int32; ``count`` rows in all."""
        numbers = torch.arange(users.start, users.stop, dtype=torch.int32, device=self.ptr.device)
        counts = self.ptr[users.start : users.stop + 1].diff()
        # Without the size a GPU would have to be waited for.
        return numbers.repeat_interleave(counts, output_size=count)

    def blocks(self, most: int) -> list[tuple[slice, slice]]:
        """Cut users into parts of about ``most`` rows: the users and the rows of each part."""
        n, rows = self.num_users, self.feature.numel()
        if rows <= most:
            return [(slice(0, n), slice(0, rows))] if rows else []
        users = [*range(0, n, max(1, most * n // rows)), n]
        first = self.ptr[users].tolist()
        every = zip(starmap(slice, pairwise(users)), starmap(slice, pairwise(first)), strict=True)
        return [(local, part) for local, part in every if part.start < part.stop]

    def to(self, device: torch.device) -> ActiveRows:
        ptr, feature, value = (tensor.to(device) for tensor in self[:3])
        return ActiveRows(ptr, feature, value, self.num_features)


def pack(x: Tensor, *, bias: bool = False) -> ActiveRows:
    """Build active rows from a feature matrix, dense or in compressed sparse row form."""
    # x [n, f]
    num_features = x.shape[1]
    if x.layout == torch.sparse_csr:
        ptr, feature, value = x.crow_indices(), x.col_indices(), x.values()
    else:
        row, feature = x.nonzero(as_tuple=True)
        ptr, value = pointers(row, len(x)), x[row, feature]
    if bias:
        # A user's bias comes after its rows.
        ptr = ptr + torch.arange(ptr.numel())
        is_own = torch.ones(int(ptr[-1]), dtype=torch.bool)
        is_own[ptr[1:] - 1] = False
        every = torch.full(is_own.shape, num_features, dtype=torch.int32)
        feature = every.masked_scatter_(is_own, feature.to(torch.int32))
        value = torch.ones(is_own.shape).masked_scatter_(is_own, value.float())
        num_features += 1
    return ActiveRows(ptr.to(torch.int32), feature.to(torch.int32), value.float(), num_features)


def take(rows: ActiveRows, users: Tensor) -> tuple[ActiveRows, Tensor]:
    """Select some users."""
    # users [p]
    user, place = row_entries(rows.ptr, users.long().to(rows.ptr.device))
    ptr = pointers(user, users.numel())
    return ActiveRows(ptr, rows.feature[place], rows.value[place], rows.num_features), place


def project(rows: ActiveRows, weight: Tensor) -> Tensor:
    """Compute every user's latent vector, ``x_i W_i``."""
    # weight [r, h]
    index = torch.arange(len(weight), dtype=torch.int32, device=weight.device)
    return weighted_sums(index, rows.ptr, rows.value, weight)


def adam_(
    rows: ActiveRows,
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    step: Tensor,
    rates: Rates,
) -> None:
    """Take one Adam step for every user, in place, from the gradients of the latent vectors."""
    # The gradient of row ``k`` of user ``i`` is ``x_ik`` times the gradient of ``i``'s latent
    # vector; weight decay is added to it, as in ``torch.optim.Adam``.
    # weight, exp_avg, exp_avg_sq [r, h], gradient [n, h], step [n]
    blocks = rows.blocks(_block_rows(weight))
    most = max((part.stop - part.start for _, part in blocks), default=0)
    buffer = weight.new_empty(most, weight.shape[1])
    for users, part in blocks:
        user, grad = rows.owners(users, part.stop - part.start), buffer[: part.stop - part.start]
        torch.index_select(gradient, 0, user, out=grad)
        grad.mul_(rows.value[part, None])
        tensors, count = [weight[part], exp_avg[part], exp_avg_sq[part], grad], step[users]
        # The fused step takes one step count. What does not fill a vector it rounds otherwise,
        # which would make a user's numbers depend on where they lie. To compare counts elsewhere
        # than on a CPU would wait for the device.
        is_one = weight.is_cpu and bool((count == count[0]).all())
        whole = user.numel() // VECTOR * VECTOR if is_one else 0
        if whole:
            first: list[Tensor] = [one[:whole] for one in tensors]
            adam_rows_(first[0], first[1], first[2], first[3], count[:1], [0, whole], rates)
        if whole < user.numel():
            _step([one[whole:] for one in tensors], step[user[whole:]][:, None], rates)


def _step(tensors: Sequence[Tensor], count: Tensor, rates: Rates) -> None:
    """Take the bit-identical step row by row, with a step count of each row."""
    weight, exp_avg, exp_avg_sq, grad = tensors  # [r, h] each; count [r, 1]
    grad.add_(weight, alpha=rates.weight_decay)
    exp_avg.lerp_(grad, 1 - BETAS[0])
    exp_avg_sq.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
    count = count.double()
    size = (rates.learning_rate / (1 - BETAS[0] ** count)).float()
    root = (1 - BETAS[1] ** count).sqrt().float()
    # PyTorch's root of float32 may be wrong in the last place, but not a GPU's.
    roots = exp_avg_sq.sqrt() if weight.is_cuda else exp_avg_sq.double().sqrt_().float()
    weight.sub_(torch.mul(exp_avg, size, out=grad).div_(roots.div_(root).add_(EPS)))


def sum_by_feature(rows: ActiveRows, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Add the users' rows feature by feature."""
    # weight [r, h]
    total = torch.zeros(
        rows.num_features, weight.shape[1], dtype=torch.float64, device=weight.device
    )
    block = _block_rows(weight)  # so that the parts stay in cache; on a GPU, one part
    for feature, part in zip(rows.feature.split(block), weight.split(block), strict=True):
        total.index_add_(0, feature.long(), part.double())
    return total, torch.bincount(rows.feature.long(), minlength=rows.num_features)


def _block_rows(weight: Tensor) -> int:
    return max(1, BLOCK_NUMBERS // weight.shape[1] if weight.is_cpu else weight.shape[0])
