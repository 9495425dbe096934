"""Sums, means, extremes and sorting."""

from trainpace.kinds.kind import Kind

KINDS = (
    Kind(
        "reduction",
        traffic={"reduction": 0.6},
        functions=dict.fromkeys(
            ("sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "std", "argmax", "cumsum", "prod", "any", "all",
             "linalg_vector_norm", "norm", "nll_loss_forward", "nll_loss_backward", "topk", "sort"), "reduction"
        ),
    ),
)  # fmt: skip
