"""Tables that are looked up, and their gradients."""

from trainpace.kinds.kind import Kind

KINDS = (
    Kind(
        "embedding",
        traffic={"embedding": 0.5, "embedding_backward": 0.2},
        functions=dict.fromkeys(("embedding", "index", "index_select", "gather"), "embedding")
        | dict.fromkeys(
            ("embedding_dense_backward", "scatter", "scatter_add", "index_put", "index_put_", "index_add", "index_add_",
             "_index_put_impl_"), "embedding_backward"
        ),
    ),
)  # fmt: skip
