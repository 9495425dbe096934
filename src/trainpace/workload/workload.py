"""Workloads: tables of the operators and the memory of one micro-batch.

Each number is affine in the batch size. It has two coefficients, a constant and an increase per
sample: ``value(batch) = c[0] + c[1] * batch``. Equal operators share a row with a `count`, so
ResNet-50 has about 200 rows, and Llama-70B not many more.
"""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import NUMBER_FORMATS, Precision
from trainpace.core.execution import Form as Form
from trainpace.core.records import Record
from trainpace.workload.kinds import KINDS

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = get_args(Phase)

Mode = Literal["train", "forward_backward", "inference"]
"""Traced part of a step.

- train: The whole step.
- forward_backward: The step without the optimizer.
- inference: A forward pass in evaluation mode.
"""


class Adaptation(NamedTuple):
    """Settings of adapter training, in which the model's own weights are frozen.

    Attributes:
        adapter: lora or dora. Empty for training without adapters.
        rank: Rank of the adapters.
        targets: Names of the linear layers that get adapters, separated by commas, or all-linear.
        dropout: Dropout probability of the adapters.
        weights: Format of the frozen weights: nf4, fp4, nf4_double (with quantized scales), int8 or
            gptq. Empty for weights that are not quantized.
        fp32_weights: Weights that stay in fp32 in a 16-bit model with packed weights: all (that are
            not packed), norms or none.
        whole: Names of the modules that are trained in full, separated by commas.
        as_the_model: True if the adapters of a 16-bit model are in 16 bits too (peft before 0.12,
            DeepSpeed's bf16 engine, autocast_adapter_dtype=False). Newer peft uses fp32.
    """

    adapter: str = ""
    rank: int = 16
    targets: str = "all-linear"
    dropout: float = 0.0
    weights: str = ""
    fp32_weights: str = "all"
    whole: str = ""
    as_the_model: bool = False

    @property
    def in_words(self) -> str:
        """Description, such as "LoRA of rank 16 over nf4, all other weights in fp32", or ""."""
        names = {"lora": "LoRA", "dora": "DoRA"}
        adapter = (
            f"{names.get(self.adapter, self.adapter)} of rank {self.rank}" if self.adapter else ""
        )
        over = " over ".join(part for part in (adapter, self.weights) if part)
        words = [over] if over else []
        words += [FP32_IN_WORDS[self.fp32_weights]] if self.weights else []
        words += [f"{self.whole.replace(',', ' and ')} trained whole"] if self.whole else []
        return ", ".join(words)


AS_IT_IS = Adaptation()
FP32_IN_WORDS = {
    "all": "all other weights in fp32",
    "norms": "norms in fp32",
    "none": "all other weights in 16 bits",
}


class Variant(NamedTuple):
    """Options for tracing a model spec. Each variant gives another workload.

    Attributes:
        optimizer: Name of the optimizer. None means the model's usual one.
        sequence_length: Tokens per sample. None means the model's usual length.
        image_size: Side of images in pixels. None means the model's usual size.
        mode: Traced part of a step.
        legacy: True for torch before 2.0: without fused attention, and with optimizers that launch
            kernels tensor by tensor.
        checkpointing: True to recompute activations in the backward pass, block by block.
        cpu: True for the operators that torch runs on a CPU: dropout in three operators, attention
            with dropout not fused, and optimizers tensor by tensor.
        adaptation: Adapters and quantized weights.
        autocast: True if a model in 16 bits runs under torch.autocast. transformers' Trainer does
            so with bf16=True for a model loaded in bf16.
    """

    optimizer: str | None = None
    sequence_length: int | None = None
    image_size: int | None = None
    mode: Mode = "train"
    legacy: bool = False
    checkpointing: bool = False
    cpu: bool = False
    adaptation: Adaptation = AS_IT_IS
    autocast: bool = False


PLAIN = Variant()
"""Default variant: the whole training step with the model's usual settings."""

LARGEST = 1e25
"""Limit for all numbers of a workload, so that their products stay finite.

The test is `abs(x) < LARGEST`, which is also False for NaN.
"""

MATRIX_KINDS = frozenset(name for name, kind in KINDS.items() if kind.is_matrix)
"""Kinds of operators on matrix units. Others are limited by memory traffic or launch time."""

ATTENTION_BACKWARD_MODEL_SHARE = 0.8
"""Share of FlashAttention's backward FLOPs that counts for MFU.

One of its 5 matmuls is a recomputation (Dao et al. 2022).
"""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]


class GemmSizes(NamedTuple):
    """Sizes of a batch of matmuls, each of m x k by k x n.

    In an operator table, m, n or k may be fractional. For a grouped matmul, one of them is the mean
    number of rows per group.
    """

    batch: int
    m: int
    n: int
    k: int


class ConvSizes(NamedTuple):
    """Sizes of a convolution in up to three dimensions.

    `channels_last` is 1 if the input is already in NHWC.
    """

    images: int
    groups: int
    c_in: int
    c_out: int
    in_d: int
    in_h: int
    in_w: int
    out_d: int
    out_h: int
    out_w: int
    kernel_d: int
    kernel_h: int
    kernel_w: int
    stride_h: int
    stride_w: int
    channels_last: int = 0


class AttentionSizes(NamedTuple):
    """Sizes of fused attention.

    Attributes:
        batch: Number of sequences.
        heads: Number of heads.
        queries: Number of queries per sequence.
        keys: Number of keys per sequence.
        head_size: Width of queries and keys per head.
        causal: 1 with a causal mask, else 0.
        value_size: Width of values per head. 0 if it equals `head_size`.
        seen: Mean number of keys that a query sees if the kernel skips masked blocks, else 0. It
            may be fractional.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    head_size: int
    causal: int
    value_size: int = 0
    seen: int = 0


class OtherSizes(NamedTuple):
    """Sizes of all other operators.

    Attributes:
        elements_in: Number of elements read.
        elements_out: Number of elements written.
        extent: Length of a normalized row, or number of elements of a pooling window.
    """

    elements_in: int
    elements_out: int
    extent: int = 0


MOST_SIZES = 16
"""Number of columns for the sizes of an operator in the table. Unused columns are 0."""
GEMM, CONV = GemmSizes(*range(4)), ConvSizes(*range(16))
ATTENTION, OTHER = AttentionSizes(*range(8)), OtherSizes(*range(3))
"""Column of each size in `Operators.dims`, for example `dims[:, GEMM.m]`."""
CONV_OUT, CONV_IN = slice(CONV.out_d, CONV.out_w + 1), slice(CONV.in_d, CONV.in_w + 1)
CONV_KERNEL, CONV_STRIDE = (
    slice(CONV.kernel_d, CONV.kernel_w + 1),
    slice(CONV.stride_h, CONV.stride_w + 1),
)
CONVOLUTION_KINDS = ("conv", "conv_dgrad", "conv_wgrad")
ATTENTION_KINDS = ("attention", "attention_backward")
GROUPED = "_grouped_mm"
"""ATen name of the grouped matmul, one call for all experts (torch.nn.functional.grouped_mm)."""


def form_of(precision: Precision) -> Form:
    """Return the number format that must be traced to forecast a precision."""
    return NUMBER_FORMATS[precision].form


def attention_widths(kind: str, head_size: Floats, value_size: Floats) -> Floats:
    """Return the multiplications per attention score (FlashAttention, arXiv:2205.14135).

    The forward pass has a matmul of queries with keys and a matmul with values. The backward pass
    recomputes queries with keys. It also computes the gradients of queries, keys and values, and of
    the scores.

    Args:
        kind: attention or attention_backward.
        head_size: Width of queries and keys per head.
        value_size: Width of values per head. 0 if it equals `head_size`.
    """
    return (
        3.0 * head_size + 2.0 * value_size
        if kind == "attention_backward"
        else 1.0 * (head_size + value_size)
    )


class Operators(Record):
    """Operator table with n rows, as a struct of arrays. Each row stands for equal operators.

    Attributes:
        kind: n names of kinds.
        function: n ATen names.
        phase: n phases of the step.
        module: n names of modules. If several modules run the operator, the first one.
        half: n booleans, True for arithmetic in 16 bits.
        count: Number of operators of each row.
        launches: Number of kernels of one operator. 0 if only the host works.
        flops: FLOPs of one operator: n x 2 coefficients over the batch size.
        read_bytes: Bytes that one operator reads: n x 2 coefficients.
        written_bytes: Bytes that one operator writes: n x 2 coefficients.
        dims: Sizes of one operator: n x 16 x 2 coefficients. They are in the order of `GemmSizes`,
            `ConvSizes`, `AttentionSizes` or `OtherSizes`, padded with zeros.
    """

    kind: tuple[str, ...]
    function: tuple[str, ...]
    phase: tuple[str, ...]
    module: tuple[str, ...]
    half: np.ndarray
    count: np.ndarray
    launches: np.ndarray
    flops: np.ndarray
    read_bytes: np.ndarray
    written_bytes: np.ndarray
    dims: np.ndarray

    def __post_init__(self) -> None:
        n = len(self.kind)
        if n == 0 or any(len(names) != n for names in (self.function, self.phase, self.module)):
            raise TrainpaceError("the operator table is empty, or its columns differ in length.")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("half", "count", "launches"), (n,))
        shapes |= dict.fromkeys(_COEFFICIENTS, (n, 2)) | {"dims": (n, MOST_SIZES, 2)}
        for name, shape in shapes.items():
            _check_array(
                getattr(self, name), shape, f"column {name} of the operator table", name == "half"
            )
        if any((getattr(self, name).sum(axis=1) < 0).any() for name in _COEFFICIENTS):
            raise TrainpaceError("the operator table has negative FLOPs or bytes at batch size 1.")
        self._check_words()
        sizes = at_batch(self.dims, 2)
        small = [self.count < 1, self.launches < 0, sizes < 0, sizes[self.is_matrix, :4] <= 0]
        if any(rows.any() for rows in small):
            raise TrainpaceError("the operator table has a count, launches or sizes too small.")

    def _check_words(self) -> None:
        if not set(self.phase) <= set(PHASES):
            raise TrainpaceError("the operator table has an unknown phase.")
        unknown = set(self.kind) - set(KINDS)
        if unknown:
            raise TrainpaceError(
                f"the operator table has an operator of kind {min(unknown)!r}.",
                f"Kinds: {', '.join(sorted(KINDS))}.",
            )

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def is_matrix(self) -> Flags:
        """True for rows whose operators run on matrix units."""
        return np.isin(self.kind, list(MATRIX_KINDS))

    def moved_bytes(self, batch: int | Floats) -> Floats:
        """Return the bytes that one operator of each row reads and writes."""
        return at_batch(self.read_bytes, batch) + at_batch(self.written_bytes, batch)


_COEFFICIENTS = ("flops", "read_bytes", "written_bytes")


def _check_array(
    array: np.ndarray, shape: tuple[int | None, ...], name: str, is_flag: bool = False
) -> None:
    """Check the shape of an array, and that its numbers are finite.

    Args:
        array: The array.
        shape: Expected shape. None stands for any length.
        name: Name of the array, for the error.
        is_flag: True for an array of booleans.

    Raises:
        TrainpaceError: If the array does not pass.
    """
    fits = len(array.shape) == len(shape) and all(
        wanted in (None, n) for n, wanted in zip(array.shape, shape, strict=True)
    )
    is_kind = array.dtype.kind in ("b" if is_flag else "if")
    if not fits or not is_kind or not (np.abs(array) < LARGEST).all():
        words = ", ".join("n" if n is None else str(n) for n in shape)
        raise TrainpaceError(f"{name} should be finite numbers of shape ({words}).")


class MemoryProfile(Record):
    """Bytes alive on one device: permanent states, and the moments that can be the memory peak.

    Attributes:
        parameter_bytes: Bytes of parameters and buffers.
        optimizer_bytes: Bytes of optimizer states.
        peaks: Array of shape (k, 3) with the moments that are the peak at some batch size: bytes
            of gradients, constant bytes of activations and temporaries, and their bytes per sample.
        moments: Array of shape (m, 5) for a memory chart. It may be empty. Columns: phase (index in
            PHASES), share of the phase's bytes moved until then, and the columns of `peaks`.
        paged_bytes: Bytes of further optimizer states, which CUDA pages to the host when the device
            is full.
        frozen_bytes: Part of parameter_bytes that is not trained.
    """

    parameter_bytes: float
    optimizer_bytes: float
    peaks: np.ndarray
    moments: np.ndarray = msgspec.field(default_factory=lambda: np.zeros((0, 5)))
    paged_bytes: float = 0.0
    frozen_bytes: float = 0.0

    def __post_init__(self) -> None:
        _check_array(self.peaks, (None, 3), "the peaks of the memory profile")
        if not self.peaks.size:
            raise TrainpaceError("the memory profile needs a peak.")
        if self.moments.size:
            _check_array(self.moments, (None, 5), "the moments of the memory profile")


Role = Literal["", "column", "row", "sharded", "expert", "replicated"]
"""Division of an operator among the ranks of tensor parallelism.

- column: The weight is split along the output dim. Each rank reads the whole input, and writes a
  part of the result.
- row: The weight is split along the input dim. An all-reduce adds the ranks' results.
- sharded: The operator works on the part of the values that the rank holds.
- expert: The operator works on the tokens routed to experts, whose matmuls are grouped. Expert
  parallelism sends these tokens to other ranks.
- replicated: Every rank runs the whole operator: norms, residuals and dropout. Sequence parallelism
  splits them along the sequence.
- "": The operator is outside the repeated blocks.
"""


class OtherBlocks(Record):
    """Equal blocks outside the chain of `Blocks`, such as the encoder beside a decoder.

    Recomputation and FSDP treat each of them like a block of the chain. Tensor and pipeline
    parallelism do not divide them. Bytes are pairs (constant, per sample), affine in the batch
    size.

    Attributes:
        module: Name of the module that contains them.
        count: Number of blocks.
        parameters: Parameters of one block. They are part of `Blocks.outside_parameters`.
        is_after: True if they run after the chain.
        operator_counts: For each row of the table, the number of operators inside all blocks. It is
            0 in blocks that save nothing for a backward pass.
        left_bytes: Bytes of the tensors that the block makes and returns. Recomputation keeps them.
        saved_bytes: Bytes that a block saves for its backward pass.
        working_bytes: Peak in a block's backward pass beyond saved bytes and gradients.
    """

    module: str
    count: int
    parameters: int
    is_after: bool
    operator_counts: np.ndarray
    left_bytes: tuple[float, float]
    saved_bytes: tuple[float, float]
    working_bytes: tuple[float, float]


class Blocks(Record):
    """Repeated blocks of a model: its longest chain of equal modules (layers of a transformer).

    Pipeline parallelism, tensor parallelism and recomputation use the blocks. Bytes are pairs
    (constant, per sample), affine in the batch size.

    Attributes:
        module: Name of the chain.
        count: Number of blocks.
        heads: Number of attention heads. 0 without attention.
        key_value_heads: Number of key-value heads. 0 without attention.
        parameters: Parameters of one block.
        tensor_parameters: Part of `parameters` that tensor parallelism splits.
        outside_parameters: Parameters before and after the blocks.
        outside_tensor_parameters: Part of `outside_parameters` in the embedding and the head of the
            vocabulary.
        tied_parameters: Parameters that count once in `outside_parameters`, but are needed at both
            ends of a pipeline.
        operator_counts: For each row of the table, the number of operators inside all blocks.
        roles: Role of each row of the table. Outside the blocks, only the embedding and the head of
            the vocabulary and the loss have roles.
        input_bytes: Bytes of the hidden state that enters a block.
        saved_bytes: Bytes that a block saves for its backward pass, including its input.
        sharded_saved_bytes: Part of `saved_bytes` that tensor parallelism splits without sequence
            parallelism.
        attention_saved_bytes: Part of `saved_bytes` that selective recomputation drops.
        working_bytes: Peak in a block's backward pass beyond saved bytes and gradients.
        outside_saved_bytes: Bytes saved outside the blocks (embedding, head, loss).
        after_saved_bytes: Part of `outside_saved_bytes` that is created after the blocks and freed
            before their backward pass.
        after_working_bytes: Peak after the blocks, in head and loss, beyond saved bytes and
            gradients.
        experts: Number of experts per block. 0 without grouped matmuls.
        expert_parameters: Parameters of the experts of a block. They are not in
            `tensor_parameters`.
        dispatched_bytes: Bytes of the tokens that the router of one block sends to experts. A token
            counts once per expert.
        expert_saved_bytes: Part of `saved_bytes` that experts create.
        others: Other blocks of the model, outside the chain.
    """

    module: str
    count: int
    heads: int
    key_value_heads: int
    parameters: int
    tensor_parameters: int
    outside_parameters: int
    outside_tensor_parameters: int
    tied_parameters: int
    operator_counts: np.ndarray
    roles: tuple[Role, ...]
    input_bytes: tuple[float, float]
    saved_bytes: tuple[float, float]
    sharded_saved_bytes: tuple[float, float]
    attention_saved_bytes: tuple[float, float]
    working_bytes: tuple[float, float]
    outside_saved_bytes: tuple[float, float]
    after_saved_bytes: tuple[float, float] = (0.0, 0.0)
    after_working_bytes: tuple[float, float] = (0.0, 0.0)
    experts: int = 0
    expert_parameters: int = 0
    dispatched_bytes: tuple[float, float] = (0.0, 0.0)
    expert_saved_bytes: tuple[float, float] = (0.0, 0.0)
    others: tuple[OtherBlocks, ...] = ()

    @property
    def are_most(self) -> bool:
        """True if the chain has at least half of the parameters of all blocks.

        Only such a chain is divided over pipeline stages and tensor-parallel ranks. ResNet-50's has
        5 of 16 blocks.
        """
        others = sum(one.count * one.parameters for one in self.others)
        return self.count * self.parameters >= others

    @property
    def all_saved_bytes(self) -> Floats:
        """Bytes that all blocks save, those outside the chain included. Shape (2,)."""
        others = (one.count * np.array(one.saved_bytes) for one in self.others)
        return sum(others, self.count * np.array(self.saved_bytes))

    def with_counts(self, change: Callable[[np.ndarray], np.ndarray], **more: Any) -> "Blocks":
        """Return the blocks of a table with other rows.

        Args:
            change: Function from the counts of the old rows to those of the new rows.
            **more: Further fields to replace.
        """
        others = tuple(
            msgspec.structs.replace(one, operator_counts=change(one.operator_counts))
            for one in self.others
        )
        return msgspec.structs.replace(
            self, operator_counts=change(self.operator_counts), others=others, **more
        )

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in self.__struct_fields__}
        numbers = [size for size in sizes.values() if isinstance(size, int)]
        pairs = [size for name, size in sizes.items() if name.endswith("_bytes")]
        for one in self.others:
            numbers += [one.count, one.parameters]
            pairs += [one.left_bytes, one.saved_bytes, one.working_bytes]
        counts, heads, of_keys = self.operator_counts, self.heads, self.key_value_heads
        divided = self.tensor_parameters + self.expert_parameters
        every = [counts, *(one.operator_counts for one in self.others)]
        is_count = all(c.shape == (len(self.roles),) and c.dtype.kind in "iu" for c in every)
        checks = {
            "finite counts": all(0 <= size < LARGEST for size in numbers),
            "at least one block": self.count >= 1,
            "as many parameters as they divide": divided <= self.parameters,
            "finite bytes": np.max(np.abs(pairs)) < LARGEST,
            "bytes of at least 0": np.min(np.sum(pairs, axis=1)) >= 0,
            "a multiple of their key-value heads": heads % max(of_keys, 1) == 0,
            "heads with keys and values": (heads == 0) == (of_keys == 0),
            "a count and a role for every row": is_count and all((c >= 0).all() for c in every),
        }
        for need, holds in checks.items():
            if not holds:
                raise TrainpaceError(f"the repeated blocks need {need}.")


class TracedForm(Record):
    """Operators, memory and repeated blocks of a workload in one number format."""

    operators: Operators
    memory: MemoryProfile
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        if self.blocks is None:
            return
        of_others = (one.operator_counts for one in self.blocks.others)
        counts = sum(of_others, self.blocks.operator_counts)
        if counts.shape != self.operators.count.shape or (counts > self.operators.count).any():
            raise TrainpaceError("the repeated blocks do not belong to this operator table.")


class TrainedShape(Record):
    """Shape of trainable parameters.

    Attributes:
        sizes: The shape.
        is_vocabulary: True for an embedding table, or a head of the same vocabulary.
        count: Number of parameters with this shape.
        is_fp32: True if they are in fp32 in every number format, like adapters.
    """

    sizes: tuple[int, ...]
    is_vocabulary: bool
    count: int
    is_fp32: bool = False


class Workload(Record):
    """Traced step of a model with its loss and optimizer, independent of the device.

    Attributes:
        model: Name of the model.
        parameters: Number of parameters.
        trainable_parameters: Number of trainable parameters.
        optimizer: Name of the optimizer, or none.
        sample: Description of a sample.
        sequence_length: Tokens per sample. None if samples are not sequences.
        traced_batches: Batch sizes of the traced steps.
        forms: {number format: operators and memory}.
        mode: Traced part of the step.
        checkpointed: True if the model recomputes activations block by block.
        sample_bytes: Bytes per sample in all tensors of a batch (images, labels).
        batch_tensors: Number of tensors in a batch.
        notes: Assumptions and omissions of the trace. Every answer repeats them.
        settings: Fields of `Execution` from the task's own loader or trainer, used as defaults.
        whole_step: True if the user's step runs its optimizers itself, once or several times.
        assumes_optimizer: True if the optimizer is a default that nobody chose.
        adaptation: Description of adapters and quantized weights.
        trained: Shapes of the trainable parameters, to trace another optimizer.
    """

    model: str
    parameters: int
    trainable_parameters: int
    optimizer: str
    sample: str
    sequence_length: int | None
    traced_batches: tuple[int, ...]
    forms: dict[Form, TracedForm]
    mode: Mode = "train"
    checkpointed: bool = False
    sample_bytes: float = 0.0
    batch_tensors: int = 2
    notes: tuple[str, ...] = ()
    settings: dict[str, int | bool | str] = msgspec.field(default_factory=dict)
    whole_step: bool = False
    assumes_optimizer: bool = False
    adaptation: str = ""
    trained: tuple[TrainedShape, ...] = ()

    @property
    def optimizer_in_words(self) -> str:
        return f"{self.optimizer} (assumed)" if self.assumes_optimizer else self.optimizer

    @property
    def only_batch(self) -> int | None:
        """The only batch size for which the workload is valid, or None if all are."""
        return self.traced_batches[0] if len(self.traced_batches) == 1 else None

    @property
    def only_batch_in_words(self) -> str:
        return f"{self.model} could only be traced at a batch size of {self.only_batch} per GPU"

    @property
    def blocks(self) -> Blocks | None:
        """Repeated blocks of the first form that has them."""
        return next((form.blocks for form in self.forms.values() if form.blocks), None)

    @property
    def has_experts(self) -> bool:
        """True if the model has layers of experts with grouped matmuls."""
        return any(GROUPED in form.operators.function for form in self.forms.values())

    @property
    def image_side(self) -> int | None:
        """Side in pixels if samples are square images, else None."""
        square = re.search(r"\b(\d+) x \1 image$", self.sample)
        return int(square[1]) if square else None

    def form(self, precision: Precision) -> TracedForm:
        """Return the operators and memory for a precision.

        Raises:
            TrainpaceError: If the number format of the precision was not traced.
        """
        wanted = form_of(precision)
        if wanted not in self.forms:
            raise TrainpaceError(
                f"this workload of {self.model} was traced for {', '.join(self.forms)}, and"
                f" {precision} needs {wanted!r}.",
                "Trace the model again: `save_workload` stores every form.",
            )
        return self.forms[wanted]


def at_batch(coefficients: Floats, batch: int | Floats) -> Floats:
    """Evaluate coefficients of shape (n, 2) at a batch size.

    Args:
        coefficients: Constants and increases per sample.
        batch: A batch size, or an array of batch sizes that broadcasts against shape (n,).
    """
    return coefficients[..., 0] + coefficients[..., 1] * batch


def multiplies_activations(operators: Operators) -> Flags:
    """Return True for each matmul of two activations. Their number grows with the batch size."""
    return (np.array(operators.kind) == "gemm") & (operators.dims[:, GEMM.batch, 1] > 0)
