"""Is every matrix product of a traced step counted, and counted right?

An operator that multiplies matrices and is not in the table of `operators` would pass for an element-wise one, and its model
would be forecast far too fast. So such an operator is refused by its name, and so is every operator of another library, of
which nothing is known. What is counted is held against torch's own formulas (torch.utils.flop_counter).
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry

from trainpace.core.errors import TrainpaceError
from trainpace.workload.operators import Row
from trainpace.workload.skipping_attention import OPERATOR, UNKNOWN
from trainpace.workload.workload import MATRIX_KINDS

LARGEST_DIFFERENCE = 0.02
"""Share of a step's FLOPs by which the two counts may differ without a word."""
CAUSAL = 0.5
"""A causal mask leaves half of attention's products to compute, which torch's formulas count whole."""
_PRODUCT = re.compile(
    r"(^|_)(mm|bmm|addmm|addbmm|baddbmm|matmul|linear|einsum|cdist|attention|rnn|lstm|gru|trilinear"
    r"|conv(olution)?([123]d|_tbc|_overrideable|_transpose\w*)?)(_|$)"
    r"|^_?(linalg|cholesky|svd|qr|lu|triangular_solve|ormqr)(_|$)"
)
"""Names of ATen calls that multiply matrices, or decompose them, which takes many products."""
_NO_PRODUCT = frozenset(
    "linalg_vector_norm linalg_cross lu_unpack _thnn_fused_lstm_cell _thnn_fused_gru_cell".split()
) | {"_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward"}
_KNOWN_LIBRARIES = {"aten", "prims", "prim", "trainpace"}
_MOVE_BYTES_ALONE = frozenset(
    f"torchvision::{name}"
    for name in "roi_align _roi_align_backward roi_pool _roi_pool_backward ps_roi_align ps_roi_pool nms".split()
)
"""Operators of other libraries that are bound by memory traffic, as they are counted."""
WHOLE_MASKS = (
    "A mask of its attention depends on values, such as where documents begin: all keys were"
    " counted, of which the kernel may skip many."
)
_SKIPPING = getattr(torch.ops.trainpace, OPERATOR).default
INSTEAD = "Measure it with `trainpace measure`, or record a short run with `trainpace watch`."


def refuse_uncounted(func: Any, rows: Sequence[Row], module: str) -> None:
    """Raise TrainpaceError for a call that may multiply matrices and of which the rows count no product."""
    if not rows or any(row.kind in MATRIX_KINDS for row in rows):
        return
    library, _, name = func._schema.name.partition("::")
    where = f" in {module}" if module else ""
    if library not in _KNOWN_LIBRARIES:
        if func._schema.name not in _MOVE_BYTES_ALONE:
            raise TrainpaceError(
                f"the operator {func._schema.name}{where} is another library's, and its FLOPs are"
                " not known.",
                INSTEAD,
            )
    elif name not in _NO_PRODUCT and _PRODUCT.search(name):
        raise TrainpaceError(
            f"the matrix products of {func._schema.name}{where} are not counted yet.", INSTEAD
        )


class FlopCheck:
    """Holds the FLOPs of the rows against torch's formulas, call by call."""

    def __init__(self) -> None:
        self._flops = 0.0
        self._differences: dict[str, float] = {}
        self._whole_masks = False

    def add(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, rows: Sequence[Row]
    ) -> None:
        if func is _SKIPPING and args[3] == UNKNOWN:
            self._whole_masks = True
        expected = _expected_flops(func, args, kwargs, out)
        if expected is None:
            return
        counted = sum(row.flops for row in rows if row.kind in MATRIX_KINDS)
        self._flops += expected
        name = func._schema.name
        self._differences[name] = self._differences.get(name, 0.0) + abs(counted - expected)

    def note(self) -> str | None:
        """Sentences where a mask is not known, and where the two counts differ by more than a little."""
        return (
            " ".join(filter(None, (WHOLE_MASKS if self._whole_masks else None, self._doubt())))
            or None
        )

    def _doubt(self) -> str | None:
        difference = sum(self._differences.values())
        if difference <= LARGEST_DIFFERENCE * self._flops:
            return None
        name = max(self._differences, key=lambda name: self._differences[name])
        return (
            "The FLOPs counted here differ from torch's own formulas by"
            f" {difference / self._flops:.0%} of a step's, most in {name}: do not trust the times"
            " before it is known which count is right."
        )


def _expected_flops(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> float | None:
    """What torch's formulas say of a call, None where there is none for it."""
    if func is torch.ops.aten.convolution_backward.default:
        # torch's own formula takes the weight's gradient of a grouped convolution for that of a dense one
        gradient, x, weight, transposed, wanted = (args[i] for i in (0, 1, 2, 7, 10))
        return float(
            sum(wanted[:2]) * conv_flop_count(x.shape, weight.shape, gradient.shape, transposed)
        )
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return None
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return float(formula(*args, **kwargs, out_val=out)) * (
        CAUSAL if arguments.get("is_causal") is True else 1.0
    )
