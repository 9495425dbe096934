"""Families of kernels:

which constants decide their times together, and which measured calls belong to them.
"""

from __future__ import annotations

from trainpace.workload import CONV, CONVOLUTION_KINDS, KINDS
from trainpace.workload.operators import Row

PASSES = ("", "_dgrad", "_wgrad")


def _each(*names: str) -> tuple[str, ...]:
    return tuple(name + suffix for name in names for suffix in PASSES)


def _tiles(unit: str) -> tuple[str, ...]:
    """Quantisation is left to whole steps:

    it shows in sweeps over batch sizes, and scattered kernels made ResNet-50 jump.
    """
    return tuple(f"conv_tile_{unit}_{name}" for name in ("half_intensity", "prologue"))


def _norms(prefixes: str, *classes: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_{name}" for name in classes for prefix in prefixes.split())


FAMILIES: dict[str, tuple[str, ...]] = {
    "conv": (
        *_each("conv_plain", "conv_tensor", "conv_tf32", "winograd", "traffic_conv"),
        "winograd_fused",
        "winograd_fused_dgrad",
        *_tiles("plain"),
        *_tiles("tensor"),
        "conv_misaligned",
        "transposes",
    ),
    "depthwise": (
        *_each("depthwise", "depthwise_nhwc"),
        "depthwise_window",
        "depthwise_wgrad_window",
        "depthwise_nhwc_window",
        "depthwise_nhwc_wgrad_window",
    ),
    "grouped": (
        *_each("grouped", "grouped_plain", "grouped_odd_nhwc"),
        "grouped_channels",
        "grouped_odd_nhwc_channels",
    ),
    "batch_norm": _norms(
        "traffic work",
        "batch_norm",
        "batch_norm_backward",
        "batch_norm_nhwc",
        "batch_norm_backward_nhwc",
    ),
    "layer_norm": _norms("traffic work row_work", "layer_norm", "layer_norm_backward"),
    "softmax": _norms("traffic work row_work", "softmax", "softmax_backward"),
    "pool": _norms("traffic work", "pool", "pool_backward", "max_pool", "max_pool_backward"),
    "elementwise": ("traffic_elementwise",),
    "copy": ("traffic_copy",),
    "fill": ("traffic_fill",),
    "reduction": ("traffic_reduction", "work_reduction"),
    "embedding": ("traffic_embedding",),
    "optimizer": _norms("traffic work", "optimizer", "optimizer_fused"),
}
"""The constants of each family."""


def group_of(name: str) -> str:
    """The constants of a family that belong together, so that a card takes all of them or none:
    those of a unit, or of a class of traffic.
    """
    if name.startswith(
        ("conv_tensor", "conv_tf32", "conv_tile_tensor", "conv_misaligned", "transposes")
    ):
        return "conv_tensor"
    if name.startswith(("conv_plain", "conv_tile_plain", "winograd")):
        return "conv_plain"
    if name.startswith("depthwise"):
        return "depthwise_nhwc" if "nhwc" in name else "depthwise"
    return name.removeprefix("row_").partition("_")[2].removesuffix("_dgrad").removesuffix("_wgrad")


UNDECIDED = ("grouped", "optimizer")
"""Families whose fit erred as much on its own kernels as what whole steps had told, or more: whole
steps go on deciding them. The lent cards' optimizers were launched by a slow host, and their
groups' kernels follow rules of cuDNN that no size shows.
"""


def family_of(rows: tuple[Row, ...]) -> str:
    """The family that most bytes of a call belong to; "" for those of no family."""
    row = max(rows, key=lambda row: row.read_bytes + row.written_bytes)
    if row.kind in CONVOLUTION_KINDS:
        groups = row.dims[CONV.groups]
        return (
            "conv" if groups == 1 else "depthwise" if groups == row.dims[CONV.c_in] else "grouped"
        )
    if row.kind not in KINDS or KINDS[row.kind].is_matrix:
        return ""
    traffic = KINDS[row.kind].functions.get(row.function) or KINDS[row.kind].usual_traffic
    if traffic in FAMILIES:
        return traffic
    return next((name for name in FAMILIES if f"traffic_{traffic}" in FAMILIES[name]), "")
