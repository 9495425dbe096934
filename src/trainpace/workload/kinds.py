"""Table of operator kinds: their names, their ATen calls, and first guesses of their speed.

To add a kind, add an entry to `KINDS`. Tracing, saved workloads, the fit of constants and the
kernel model all use this table.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """Kind of operators.

    Attributes:
        traffic: {class of memory traffic: share of the bandwidth that it reaches}, the usual class
            first. The shares are first guesses; `make fit` replaces them (`traffic_*`).
        functions: {name of an ATen call without overload: class of its memory traffic}.
        extent: Function of (name, arguments, inputs) that returns a length. The length affects the
            time in addition to the number of elements. It may use `shape`, `dim()` and `numel()`
            of tensors.
        is_matrix: True if the operators run on matrix units.
        work: {class of traffic: FLOPs on CUDA cores per element read or written}. First guesses
            (`work_*`), 1 by default. This work limits kernels that take as long in 16 bits as in
            32.
        row_work: The same per row of `extent` elements (`row_work_*`).
        gathers: Calls that read only as many bytes of a table as they write.
    """

    name: str
    traffic: Mapping[str, float] = {}
    functions: Mapping[str, str] = {}
    extent: Callable[[str, Sequence[Any], Sequence[Any]], int] | None = None
    is_matrix: bool = False
    work: Mapping[str, float] = {}
    row_work: Mapping[str, float] = {}
    gathers: str = ""

    @property
    def usual_traffic(self) -> str:
        """The first class of memory traffic, or the kind's name if it has no classes."""
        return next(iter(self.traffic), self.name)


def _calls(**calls: str) -> dict[str, str]:
    """Return {call: class of traffic} from the space-separated calls of each class."""
    return {call: traffic for traffic, names in calls.items() for call in names.split()}


def _normalised(name: str, args: Sequence[Any], inputs: Sequence[Any]) -> int:
    """Return the number of elements that a norm averages over."""
    x = args[0]
    if "layer_norm" in name or "rms_norm" in name:
        shape = args[2] if "backward" in name else args[1]
        return math.prod(shape) if isinstance(shape, list | tuple) else int(x.shape[-1])
    return int(x.numel() // max(1, int(x.shape[1] if x.dim() > 1 else 1)))


def _summed(name: str, args: Sequence[Any], inputs: Sequence[Any]) -> int:
    """Return the number of elements in the sum of a softmax."""
    x = args[0]
    return int(x.shape[args[2] if "backward" in name else args[1]]) if x.dim() else 1


def _window(name: str, args: Sequence[Any], inputs: Sequence[Any]) -> int:
    """Return the number of elements of a pooling window."""
    if "adaptive" in name:
        sizes = [t.numel() for t in inputs]
        return max(1, max(sizes) // max(1, min(sizes)))
    kernel = args[2] if "backward" in name else args[1]
    return math.prod(kernel) if isinstance(kernel, list | tuple) else 1


_KINDS = (
    # Calls without an entry are elementwise too. So are optimizers' updates, limited by bytes.
    Kind("elementwise", traffic={"elementwise": 0.8}),
    Kind(
        "optimizer",
        traffic={"optimizer": 0.8, "optimizer_fused": 0.8},
        functions=_calls(
            optimizer_fused=(
                "_fused_adamw_ _fused_adam_ _fused_sgd_ _fused_adagrad_ blockwise_update_"
            )
        ),
        work={"optimizer": 10, "optimizer_fused": 10},
    ),
    Kind(
        "embedding",
        traffic={"embedding": 0.5, "embedding_backward": 0.2},
        functions=_calls(
            embedding=(
                "embedding index index_select gather sparse_product _embedding_bag"
                " _embedding_bag_forward_only sparse_add_"
            ),
            embedding_backward=(
                "embedding_dense_backward scatter scatter_add index_put index_put_ index_add"
                " index_add_ _index_put_impl_ _embedding_bag_dense_backward"
            ),
        ),
        gathers="embedding index index_select gather",
    ),
    # These kinds cost time on the host only: calls that change metadata, and modules entered.
    Kind("view"),
    Kind("module"),
    # These kinds run on matrix units.
    Kind("gemm", is_matrix=True),
    Kind("conv", traffic={"conv": 0.75}, is_matrix=True),
    Kind("conv_dgrad", traffic={"conv_dgrad": 0.75}, is_matrix=True),
    Kind("conv_wgrad", traffic={"conv_wgrad": 0.75}, is_matrix=True),
    Kind("attention", is_matrix=True),
    Kind("attention_backward", is_matrix=True),
    Kind(
        "copy",
        traffic={"copy": 0.7},
        functions=_calls(
            copy="_to_copy copy_ clone cat stack split_with_sizes_copy constant_pad_nd roll flip"
        ),
    ),
    Kind(
        "fill",
        traffic={"fill": 0.8},
        functions=_calls(
            fill=(
                "zeros ones full zeros_like ones_like full_like fill_ zero_ new_zeros new_ones"
                " new_full arange scalar_tensor eye tril triu"
            )
        ),
    ),
    Kind(
        "norm",
        traffic={
            "batch_norm": 0.6,
            "batch_norm_inference": 0.9,
            "batch_norm_backward": 0.6,
            "batch_norm_nhwc": 0.6,
            "batch_norm_backward_nhwc": 0.5,
            "layer_norm": 0.7,
            "layer_norm_backward": 0.4,
        },
        functions=_calls(
            batch_norm="native_batch_norm cudnn_batch_norm _native_batch_norm_legit",
            batch_norm_inference="native_batch_norm_inference",
            batch_norm_backward="native_batch_norm_backward",
            layer_norm="native_layer_norm native_group_norm _fused_rms_norm",
            layer_norm_backward=(
                "native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward"
            ),
        ),
        work={
            "batch_norm": 100,
            "batch_norm_backward": 100,
            "batch_norm_nhwc": 100,
            "batch_norm_backward_nhwc": 100,
            "layer_norm": 20,
            "layer_norm_backward": 50,
        },
        row_work={"layer_norm": 10_000, "layer_norm_backward": 10_000},
        extent=_normalised,
    ),
    Kind(
        "softmax",
        traffic={"softmax": 0.7, "softmax_backward": 0.7},
        functions=_calls(
            softmax="_softmax _log_softmax _safe_softmax",
            softmax_backward="_softmax_backward_data _log_softmax_backward_data",
        ),
        work={"softmax": 20, "softmax_backward": 20},
        row_work={"softmax": 2000, "softmax_backward": 2000},
        extent=_summed,
    ),
    Kind(
        "pool",
        traffic={"pool": 0.6, "pool_backward": 0.3, "max_pool": 0.6, "max_pool_backward": 0.3},
        functions=_calls(
            pool="avg_pool2d _adaptive_avg_pool2d avg_pool3d",
            pool_backward="avg_pool2d_backward _adaptive_avg_pool2d_backward",
            max_pool="max_pool2d_with_indices max_pool3d_with_indices",
            max_pool_backward="max_pool2d_with_indices_backward",
        ),
        work={"pool": 100, "pool_backward": 200, "max_pool": 100, "max_pool_backward": 200},
        extent=_window,
    ),
    Kind(
        "reduction",
        traffic={"reduction": 0.6},
        functions=_calls(
            reduction=(
                "sum mean amax amin max min var var_mean std argmax cumsum prod any all"
                " linalg_vector_norm norm nll_loss_forward nll_loss_backward topk sort"
            )
        ),
        work={"reduction": 20},
        gathers="nll_loss_forward nll_loss_backward",
    ),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _KINDS}
FUNCTIONS: dict[str, Kind] = {function: kind for kind in _KINDS for function in kind.functions}
"""Kind of each listed ATen call."""
TRAFFIC_SHARES: dict[str, float] = {
    name: share for kind in _KINDS for name, share in kind.traffic.items()
}
"""First guess of the share of the memory bandwidth, by class of memory traffic."""
WORK: dict[str, float] = {name: work for kind in _KINDS for name, work in kind.work.items()}
ROW_WORK: dict[str, float] = {name: work for kind in _KINDS for name, work in kind.row_work.items()}
"""First guesses of FLOPs on CUDA cores per element and per row, by class of memory traffic."""
GATHERS: frozenset[str] = frozenset(name for kind in _KINDS for name in kind.gathers.split())
