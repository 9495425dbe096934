"""What a kernel does, and what a range or a call on the host stands for, by their names. Names come from open sources and traces:
cuBLAS and CUTLASS, cuDNN, ATen, Triton, Inductor, NCCL and RCCL (which keeps NCCL's names), rocBLAS (Cijk), FlashAttention.
"""

from __future__ import annotations

import re
from functools import cache

KERNEL_KINDS = {
    "matrix": "matrix products, convolutions, attention",
    "memory": "element-wise and other memory-bound kernels",
    "other": "other kernels",
}
"""Kinds of kernels that compute, in words."""
_COMMUNICATION = re.compile(r"nccl|rccl|oneccl|nvshmem|cross_device_reduce|deep_ep|multimem_all")
_MATRIX = re.compile(
    r"gemm|cutlass|cublas|nvjet|wgmma|cijk_|winograd|implicit_con|conv(?!ert)|fprop|dgrad|wgrad|xmma|flash|fmha|attention|_mm_|matmul"
)
_NO_MATRIX = re.compile(
    r"elementwise|bn_fw|bn_bw|batch_?norm|layer_?norm|reduce_kernel|softmax_warp|splitkreduce"
)
_MEMORY = re.compile(
    r"elementwise|reduce|softmax|norm|bn_fw|bn_bw|copy|cat|index|gather|scatter|embedding|dropout|multi_tensor|foreach|adam|sgd|"
    r"pool|transpose|permute|fill|triton_(poi|red|per)|nchw|nhwc|memset|memcpy|cast|upsample|nll_loss|cross_entropy|activation"
)
DATA_RANGE, STEP_RANGE, OPTIMIZER_RANGE = "enumerate(data", "profilerstep#", "optimizer.step#"
"""What torch's own ranges begin with, in small letters."""


@cache
def kind_of(name: str) -> str:
    """communication, matrix, memory or other."""
    low = name.lower()
    if _COMMUNICATION.search(low):
        return "communication"
    if _MATRIX.search(low) and not _NO_MATRIX.search(low):
        return "matrix"
    return "memory" if _MEMORY.search(low) else "other"


def kind_of_copy(name: str) -> str:
    """Copies between devices are communication, those within one are kernels that only move memory, the others copies."""
    low = name.lower()
    if any(between in low for between in ("ptop", "peer")):
        return "communication"
    return (
        "memory"
        if any(within in low for within in ("memset", "dtod", "device -> device"))
        else "copy"
    )


def waits_for_data(range_name: str) -> bool:
    low = range_name.lower()
    return low.startswith(DATA_RANGE) or ("dataload" in low and "next" in low)


def waits_for_device(call: str) -> bool:
    """Whether a call of the runtime library returns only when the device is done."""
    low = call.lower()
    blocking_copy = low.startswith(("cudamemcpy", "hipmemcpy")) and "async" not in low
    return "synchronize" in low or blocking_copy


def exchanges(operator: str) -> bool:
    """Whether an operator on the host exchanges between ranks."""
    return operator.lower().startswith(("gloo:", "mpi:", "nccl:", "ucc:", "c10d::"))


@cache
def short(name: str) -> str:
    """A kernel's name without namespaces and types, with the function that an element-wise one applies."""
    plain = name.replace("(anonymous namespace)", "").removeprefix("void ")
    head = re.split(r"[<(]", plain, maxsplit=1)[0].split("::")[-1].strip() or plain[:60]
    applied = re.search(
        r"CUDAFunctor_(\w+)|(\w+?)_?(?:[Ff]unctor|_kernel_impl|_kernel_cuda)\b", plain[len(head) :]
    )
    inner = re.search(r"<\s*(cutlass_\w+|cudnn::\w+)", plain)
    function = (applied[1] or applied[2]) if applied else ""
    detail = inner[1] if inner else function if function not in head else ""
    return f"{head} {detail}".strip()[:48]
