"""Graph operators: normalised adjacency, sparse products with gradients, the graph Laplacian."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import embedding_bag, pad

with warnings.catch_warnings():  # PyTorch calls its CSR layout beta at the first use in a process
    warnings.simplefilter("ignore")
    torch.zeros(1, 1).to_sparse_csr()

# Numbers of a row from which on a CPU adds up an embedding's rows in half the time of MKL's sparse
# product or less; the order of a row's sum is another.
WIDE = 32

# Rows that have at most this part of a matrix's entries are multiplied by themselves, if the whole
# product would take more than a millisecond or two
FEW, SMALL = 8, 1 << 17


class Saved(FunctionCtx):
    """PyTorch's context; it has whatever the forward pass leaves for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...


class Adjacency(NamedTuple):
    """A sparse matrix and its transpose, both in CSR form, ``[n, n]``."""

    matrix: Tensor
    transpose: Tensor

    def to(self, device: torch.device | str) -> Adjacency:
        return Adjacency(self.matrix.to(device), self.transpose.to(device))


class SortedEdges(NamedTuple):
    """Edges of an undirected graph in both directions, by source, then target, in 32 bits.

    The matrices of such a graph are symmetric, and are built without sorting.
    """

    ptr: Tensor  # [n + 1] int32; the edges of node i are ptr[i] to ptr[i + 1]
    other: Tensor  # [e] int32; where they end

    @property
    def num_nodes(self) -> int:
        return self.ptr.numel() - 1

    @property
    def edge_index(self) -> Tensor:
        """The same as int64 ``[2, e]``."""
        node = torch.arange(self.num_nodes, device=self.ptr.device)
        return torch.stack([node.repeat_interleave(self.ptr.diff()), self.other.long()])

    def step(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """List the neighbours of all given nodes: the node's index, and the neighbour."""
        place, entry = row_entries(self.ptr, nodes)
        return place, self.other[entry].long()

    def to(self, device: torch.device) -> SortedEdges:
        return SortedEdges(self.ptr.to(device), self.other.to(device))

    def among(self, kept: Tensor) -> SortedEdges:
        """Return the edges whose two ends are kept, ``[n]`` bool."""
        both = kept.repeat_interleave(self.ptr.diff()) & kept.index_select(0, self.other)
        before = pad(both.cumsum(0, dtype=torch.int32), (1, 0))
        return SortedEdges(before.index_select(0, self.ptr), self.other[both])


def sorted_edges(edge_index: Tensor, n: int) -> SortedEdges | None:
    """Return an undirected graph's edges in 32 bits; None if they are not sorted."""
    # edge_index [2, e]
    source, target = edge_index
    same, ascends = source[1:] == source[:-1], target[1:] > target[:-1]
    if not ((source[1:] > source[:-1]) | (same & ascends)).all():
        return None
    return SortedEdges(pointers(source, n), target.to(torch.int32))


def csr(row: Tensor, col: Tensor, value: Tensor, rows: int, columns: int | None = None) -> Tensor:
    """Build a CSR matrix from entries in any order; square by default."""
    order = torch.argsort(row, stable=True)
    size = rows, rows if columns is None else columns
    return csr_tensor(pointers(row, rows), col[order].to(torch.int32), value[order], size)


def pointers(index: Tensor, n: int) -> Tensor:
    """Count entries per row and return where each row begins, ``[n + 1]`` int32."""
    ptr = torch.zeros(n + 1, dtype=torch.int64, device=index.device)
    ptr[1:] = torch.bincount(index, minlength=n).cumsum(0)
    return ptr.to(torch.int32)


def row_entries(ptr: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """List the entries of rows of a CSR matrix: their index in ``rows``, and their position."""
    # ptr [n + 1], rows [m]
    first, count = ptr[rows].long(), (ptr[rows + 1] - ptr[rows]).long()
    place = torch.arange(rows.numel(), device=rows.device).repeat_interleave(count)
    # Counts up within each row, from its first entry.
    first -= count.cumsum(0) - count
    return place, torch.arange(place.numel(), device=rows.device) + first[place]


def csr_tensor(ptr: Tensor, col: Tensor, value: Tensor, size: tuple[int, int]) -> Tensor:
    """Wrap CSR parts without checking them; the callers build them sorted and complete."""
    return torch.sparse_csr_tensor(ptr, col, value, size, check_invariants=False)


def adjacency(edge_index: Tensor, value: Tensor, n: int) -> Adjacency:
    """Build the matrix that sums messages from sources to targets, with its transpose."""
    # edge_index [2, e], value [e]
    source, target = edge_index
    return both_ways(target, source, value, n, n)


def entries(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, column and value of every non-zero entry, row by row."""
    # x [n, f], dense or in CSR form
    if x.layout != torch.sparse_csr:
        row, column = x.nonzero(as_tuple=True)
        return row, column, x[row, column]
    row, column, value = _all_entries(x)
    kept = value != 0
    return row[kept], column[kept], value[kept]


def _all_entries(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = x.crow_indices().diff()
    row = torch.arange(x.shape[0], device=count.device).repeat_interleave(count)
    return row, x.col_indices().long(), x.values()


def compact(x: Tensor) -> Tensor:
    """Return a matrix in CSR form if at most a third of its entries are not 0, else as it is."""
    if x.layout == torch.strided and 3 * int(x.count_nonzero()) > x.numel():
        return x
    return csr(*entries(x), *x.shape)


def both_ways(row: Tensor, column: Tensor, value: Tensor, rows: int, columns: int) -> Adjacency:
    """Build a matrix from its entries, with its transpose."""
    return Adjacency(csr(row, column, value, rows, columns), csr(column, row, value, columns, rows))


def values_at(edges: Tensor, known: Tensor, value: Tensor, n: int) -> Tensor:
    """Look up the values of some edges among all edges."""
    # edges [2, m], each among known [2, e], which are in any order; value [e]
    keys, order = (known[0] * n + known[1]).sort()
    return value[order[torch.searchsorted(keys, edges[0] * n + edges[1])]]


def gcn_adjacency(
    edge_index: Tensor | SortedEdges, n: int, weight: Tensor | None = None
) -> Adjacency:
    """Normalise symmetrically with self-loops: ``D^(-1/2) (A + I) D^(-1/2)``."""
    if isinstance(edge_index, SortedEdges):
        return _sorted_gcn_adjacency(edge_index)
    # edge_index [2, e], weight [e]: entries of A; the self-loops weigh 1
    edges = with_self_loops(edge_index, n)
    if weight is not None:
        entries = torch.cat([weight, weight.new_ones(n)])
        root = weight.new_zeros(n).index_add_(0, edges[1], entries).rsqrt()
        return adjacency(edges, root[edges[0]] * entries * root[edges[1]], n)
    root = torch.bincount(edges[1], minlength=n).float().rsqrt()
    return adjacency(edges, root[edges[0]] * root[edges[1]], n)


def _sorted_gcn_adjacency(edges: SortedEdges) -> Adjacency:
    """Build the same from sorted edges: each row has its neighbours, then itself."""
    n, device = edges.num_nodes, edges.ptr.device
    node = torch.arange(n, dtype=torch.int32, device=device)
    ptr = edges.ptr + torch.arange(n + 1, dtype=torch.int32, device=device)
    own = (ptr[1:] - 1).long()
    column = torch.empty(edges.other.numel() + n, dtype=torch.int32, device=device)
    is_other = torch.ones_like(column, dtype=torch.bool)
    is_other[own] = False
    column.masked_scatter_(is_other, edges.other)
    column[own] = node
    del is_other
    root = ptr.diff().float().rsqrt()
    value = root.repeat_interleave(ptr.diff())
    value *= root.index_select(0, column)
    matrix = csr_tensor(ptr, column, value, (n, n))
    return Adjacency(matrix, matrix)


def with_part(graph: Adjacency, nodes: Tensor, part: Adjacency) -> Adjacency:
    """Replace the rows of some nodes, which no edge joins to others, by those of ``part``."""
    # graph [n, n], nodes [m], part [m, m]
    pairs = zip(graph, part, strict=True)
    return Adjacency(*(_with_part(whole, nodes, one) for whole, one in pairs))


def _with_part(whole: Tensor, nodes: Tensor, part: Tensor) -> Tensor:
    (row, col, value), (inner, inner_col, inner_value) = _all_entries(whole), _all_entries(part)
    is_kept = torch.ones(whole.shape[0], dtype=torch.bool, device=row.device)
    is_kept[nodes] = False
    kept = is_kept[row]
    return csr(
        torch.cat([row[kept], nodes[inner]]),
        torch.cat([col[kept], nodes[inner_col]]),
        torch.cat([value[kept], inner_value]),
        whole.shape[0],
    )


def mean_adjacency(edge_index: Tensor, n: int) -> Adjacency:
    """Average over the neighbours; zero for a node that has none."""
    # edge_index [2, e]
    degree = torch.bincount(edge_index[1], minlength=n).float()
    return adjacency(edge_index, 1 / degree[edge_index[1]], n)


def with_self_loops(edge_index: Tensor, n: int) -> Tensor:
    """Append one self-loop per node, ``[2, e + n]``."""
    loop = torch.arange(n, device=edge_index.device)
    return torch.cat([edge_index, torch.stack([loop, loop])], dim=1)


def weighted_sums(index: Tensor, ptr: Tensor, value: Tensor, rows: Tensor) -> Tensor:
    """Add up rows by groups, each row times its value."""
    # index, value [e]; ptr [g + 1]; rows [n, h]
    return embedding_bag(
        index, rows, ptr, mode="sum", per_sample_weights=value, include_last_offset=True
    )


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    if x.shape[1] >= WIDE and x.device.type == "cpu" and x.dtype == torch.float32:
        return weighted_sums(matrix.col_indices(), matrix.crow_indices(), matrix.values(), x)
    # The operator would clear and copy the result first.
    out = x.new_empty(matrix.shape[0], x.shape[1])
    return torch.addmm(out, matrix, x, beta=0, out=out)  # beta 0: what lies in `out` is not read


class _SparseProduct(torch.autograd.Function):
    """``A @ x`` for a constant A, or some of its rows to the bit; the others are undefined."""

    @staticmethod
    def forward(
        ctx: Saved, x: Tensor, matrix: Tensor, transpose: Tensor, rows: Tensor | None
    ) -> Tensor:
        ctx.matrix, ctx.transpose, ctx.rows = matrix, transpose, rows
        return _part_of_product(matrix, rows, x)

    @staticmethod
    def backward(ctx: Saved, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad, far = grads[0].contiguous(), None
        if ctx.rows is not None:
            grad = torch.zeros_like(grad)
            grad[ctx.rows] = grads[0][ctx.rows]
            far = columns_of(ctx.matrix, ctx.rows)
        return _part_of_product(ctx.transpose, far, grad), None, None, None


def _part_of_product(matrix: Tensor, rows: Tensor | None, x: Tensor) -> Tensor:
    """Compute some rows of ``matrix @ x``, zeros elsewhere; all rows if they are not few."""
    if rows is None or not _is_few(matrix, rows):
        return _product(matrix, x)
    # rows [m]; every entry of a row counts, 0 or not: the order of its sum is the whole product's
    place, entry = row_entries(matrix.crow_indices(), rows)
    ptr = pointers(place, rows.numel()).to(matrix.crow_indices().dtype)
    col, value = matrix.col_indices()[entry], matrix.values()[entry]
    result = x.new_zeros(matrix.shape[0], x.shape[1])
    result[rows] = _product(csr_tensor(ptr, col, value, (rows.numel(), matrix.shape[1])), x)
    return result


def _is_few(matrix: Tensor, rows: Tensor) -> bool:
    """Whether the rows have a small part of a large matrix's entries."""
    first, size = matrix.crow_indices(), matrix.values().numel()
    return size > SMALL and FEW * int((first[rows + 1] - first[rows]).sum()) <= size


def columns_of(matrix: Tensor, rows: Tensor) -> Tensor | None:
    """Return the columns in which some rows have entries, ascending; None if rows are not few."""
    # rows [m]
    if not _is_few(matrix, rows):
        return None
    is_there = torch.zeros(matrix.shape[1], dtype=torch.bool, device=rows.device)
    is_there[matrix.col_indices()[row_entries(matrix.crow_indices(), rows)[1]].long()] = True
    return is_there.nonzero().flatten()


def propagate(graph: Adjacency, x: Tensor, rows: Tensor | None = None) -> Tensor:
    """Sum the neighbours' vectors, weighted by the matrix; with ``rows``, of these only."""
    # x [n, h], rows [m]
    return _SparseProduct.apply(x.contiguous(), *graph, rows)  # type: ignore[no-any-return, no-untyped-call]


def sampled_products(ptr: Tensor, col: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Compute some entries of ``left @ right^T``."""
    # ptr, col [n + 1], left, right [n, h]
    n, m, e = left.shape[0], right.shape[0], col.numel()
    if e > n * m:  # PyTorch's operator knows no more entries than the matrix has places
        row = torch.arange(n, device=col.device).repeat_interleave(ptr.diff())
        return (left[row] * right[col]).sum(1)
    places = csr_tensor(ptr, col, left.new_zeros(e), (n, m))
    products: Tensor = torch.sparse.sampled_addmm(places, left, right.T).values()
    return products


def weighted_product(
    value: Tensor,
    x: Tensor,
    ptr: Tensor,
    col: Tensor,
    turned: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Multiply a matrix ``[n, n]`` with ``x``; its entries have gradients, too.

    ``turned`` has rows and columns of the transpose, and the order of its entries; without it the
    matrix is symmetric.
    """
    return _WeightedProduct.apply(value.contiguous(), x.contiguous(), ptr, col, turned)  # type: ignore[no-any-return, no-untyped-call]


class _WeightedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Saved, value: Tensor, x: Tensor, ptr: Tensor, col: Tensor, turned: Any) -> Any:
        ctx.save_for_backward(value, x, ptr, col, *(turned or (ptr, col, None)))
        return _product(csr_tensor(ptr, col, value, (len(x), len(x))), x)

    @staticmethod
    def backward(ctx: Saved, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        value, x, ptr, col, turned_ptr, turned_col, order = ctx.saved_tensors
        grad, grad_x = grads[0].contiguous(), None
        if ctx.needs_input_grad[1]:
            value = value if order is None else value.index_select(0, order)
            grad_x = _product(csr_tensor(turned_ptr, turned_col, value, (len(x), len(x))), grad)
        # The gradient by entry ``ij`` is ``g_i . x_j``, without a tensor of edges by numbers
        return sampled_products(ptr, col, grad, x), grad_x, None, None, None


class LaplacianTerm(NamedTuple):
    """A graph's edges as a matrix, and its degrees, for ``L_reg``."""

    edges: Adjacency  # Every edge with weight 1
    degree: Tensor  # [n, 1] edges that end at a node plus edges that start there
    neighbourhoods: int  # sum_i |N_i|, where N_i has the node itself (nFedGNN, section 2.1)


def laplacian_term(edge_index: Tensor | SortedEdges, n: int) -> LaplacianTerm:
    """Prepare ``L_reg`` for a graph."""
    # edge_index [2, e]
    if isinstance(edge_index, SortedEdges):
        ptr, other = edge_index
        ones = torch.ones(other.numel(), device=other.device)
        matrix = csr_tensor(ptr, other, ones, (n, n))
        ends = 2 * ptr.diff().float()
        return LaplacianTerm(Adjacency(matrix, matrix), ends[:, None], other.numel() + n)
    e = edge_index.shape[1]
    ends = torch.bincount(edge_index.reshape(-1), minlength=n).float()
    ones = torch.ones(e, device=edge_index.device)
    return LaplacianTerm(adjacency(edge_index, ones, n), ends[:, None], e + n)


class _LaplacianSum(torch.autograd.Function):
    """``sum_ij ||x_i - x_j||^2`` over the edges; three work tensors, where autograd takes nine."""

    @staticmethod
    def forward(ctx: Saved, x: Tensor, degree: Tensor, matrix: Tensor, transpose: Tensor) -> Tensor:
        ctx.around = matrix @ x
        ctx.save_for_backward(x, degree)
        ctx.transpose = transpose
        work = degree * x
        squares = work.mul_(x).sum()
        return squares - 2 * torch.mul(x, ctx.around, out=work).sum()

    @staticmethod
    def backward(ctx: Saved, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, degree = ctx.saved_tensors
        one, two = grads[0], -2 * grads[0]
        grad = ctx.around.mul_(two)
        del ctx.around
        work = two * x
        grad += ctx.transpose @ work
        grad += torch.mul(degree, x, out=work).mul_(one)
        grad += torch.mul(x, one, out=work).mul_(degree)
        return grad, None, None, None


def laplacian_regulariser(term: LaplacianTerm, x: Tensor) -> Tensor:
    """Mean squared distance between the latent vectors of neighbours, ``L_reg``."""
    # ``(1 / sum_i |N_i|) sum_i sum_{j in N_i} ||x_i - x_j||^2``, with ``||a - b||^2`` multiplied
    # out so that no tensor of edges by numbers is made. For several heads the vectors are the
    # concatenation, which sums the heads' terms.
    # x [n, h]
    total: Tensor = _LaplacianSum.apply(x.contiguous(), term.degree, *term.edges)  # type: ignore[no-untyped-call]
    return total / term.neighbourhoods
