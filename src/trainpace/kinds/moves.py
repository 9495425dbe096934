"""Copies and fills."""

from trainpace.kinds.kind import Kind

KINDS = (
    Kind(
        "copy",
        traffic={"copy": 0.7},
        functions=dict.fromkeys(
            ("_to_copy", "copy_", "clone", "cat", "stack", "split_with_sizes_copy", "constant_pad_nd", "roll", "flip"), "copy"
        ),
    ),
    Kind(
        "fill",
        traffic={"fill": 0.8},
        functions=dict.fromkeys(
            ("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "fill_", "zero_", "new_zeros", "new_ones",
             "new_full", "arange", "scalar_tensor", "eye", "tril", "triu"), "fill"
        ),
    ),
)  # fmt: skip
