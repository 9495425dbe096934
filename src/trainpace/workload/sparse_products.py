"""Products of a sparse matrix, such as a graph's adjacency, with a dense one: an operator of our own stands for them in a trace.

The meta device has no sparse products. On a GPU one kernel reads a row of the dense matrix for each value of the sparse one; its
time is memory's, and its FLOPs are two for each number that it reads so. The gradient of the dense matrix is such a product with
the transposed matrix. A sparse matrix that is trained itself is not known here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainpace.core.errors import TrainpaceError

OPERATOR = "sparse_product"
_library = torch.library.Library("trainpace", "FRAGMENT")
_library.define(f"{OPERATOR}(Tensor indices, Tensor values, Tensor dense, int rows) -> Tensor")
_library.impl(
    OPERATOR, lambda indices, values, dense, rows: dense.new_empty(rows, *dense.shape[1:]), "Meta"
)
_PRODUCTS = {
    torch.spmm,
    torch.mm,
    torch.matmul,
    torch.sparse.mm,
    torch.Tensor.mm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.mv,
    torch.dsmm,
    torch.hspmm,
}


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indices: torch.Tensor, values: torch.Tensor, dense: torch.Tensor, rows: int
    ) -> torch.Tensor:
        ctx.save_for_backward(indices, values)
        ctx.rows = dense.shape[0]
        out: torch.Tensor = getattr(torch.ops.trainpace, OPERATOR)(indices, values, dense, rows)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        indices, values = ctx.saved_tensors
        return (
            None,
            None,
            getattr(torch.ops.trainpace, OPERATOR)(indices, values, gradient, ctx.rows),
            None,
        )


def sparse_call(func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What to call in the place of a product whose first matrix is sparse and without values; None for all others."""
    if (
        func not in _PRODUCTS
        or not args
        or not isinstance(args[0], torch.Tensor)
        or args[0].layout is torch.strided
    ):
        return None
    return _product


def _product(matrix: torch.Tensor, dense: torch.Tensor) -> Any:
    if matrix.requires_grad or dense.layout is not torch.strided:
        raise TrainpaceError(
            "a product of two sparse matrices, or with one that is trained, is not counted yet."
        )
    if matrix.shape[1] != dense.shape[0]:
        raise RuntimeError(
            f"a matrix of {tuple(matrix.shape)} is not multiplied by one of {tuple(dense.shape)}"
        )
    return _Product.apply(
        matrix._indices(), matrix._values(), dense.to(matrix.dtype), matrix.shape[0]
    )
