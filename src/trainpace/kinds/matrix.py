"""Products, convolutions and fused attention, which run on matrix units; their forms are in `trainpace.forecast.matrix`."""

from trainpace.kinds.kind import Kind

KINDS = tuple(
    Kind(name, is_matrix=True)
    for name in ("gemm", "conv", "conv_dgrad", "conv_wgrad", "attention", "attention_backward")
)
