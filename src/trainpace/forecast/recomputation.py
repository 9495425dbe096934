"""What selective recomputation repeats and keeps.

Where attention's products, softmax and dropout are kernels of their own, they alone are repeated (Korthikanti et al. 2022,
section 5). Where attention is one fused kernel there is nothing of that to give up; then selective means what PyTorch's
selective checkpointing in torchtitan means: kept are attention's result and every second product's, all else is repeated
(torchtitan's models/llama3/parallelize.py, option "op").
"""

import numpy as np
from numpy.typing import NDArray

from trainpace.workload import Blocks, Operators, multiplies_activations

Floats = NDArray[np.float64]

REPEATED_PRODUCTS = 0.5


def gives_up_attention(blocks: Blocks) -> bool:
    """Does attention keep products and softmax for its backward pass?"""
    return max(blocks.attention_saved_bytes) > 0


def repeated_share(operators: Operators, blocks: Blocks | None) -> Floats:
    """How much of each row's forward operators inside the blocks selective recomputation repeats, from 0 to 1; n."""
    if blocks is None:
        return np.zeros(len(operators))
    kind = np.array(operators.kind)
    forward = (np.array(operators.phase) == "forward") & (blocks.operator_counts > 0)
    share: Floats = np.select([kind == "attention", kind == "gemm"], [0.0, REPEATED_PRODUCTS], 1.0)
    if gives_up_attention(blocks):
        share = (multiplies_activations(operators) | np.isin(kind, ("attention", "softmax"))).astype(np.float64)
    return np.where(forward, share, 0.0)


def kept_bytes(operators: Operators, blocks: Blocks) -> tuple[float, float]:
    """What one block keeps under it, affine in the batch, where attention is fused: its input and the results kept."""
    kind = np.array(operators.kind)
    results = (np.array(operators.phase) == "forward") & np.isin(kind, ("gemm", "attention"))
    share = np.where(kind == "attention", 1.0, 1 - REPEATED_PRODUCTS) * results * blocks.operator_counts / blocks.count
    constant, slope = (share[:, None] * operators.written_bytes).sum(axis=0).tolist()
    return blocks.input_bytes[0] + constant, blocks.input_bytes[1] + slope
