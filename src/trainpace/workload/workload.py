"""Table of one micro-batch's operators, with numbers affine in the batch size.

A quantity has two coefficients, constant and per sample: ``value(batch) = c[0] + c[1] * batch``.
Alike operators share a row with a `count`, so ResNet-50 has about 200 rows, and Llama-70B not many
more.
"""

import re
from typing import Literal, NamedTuple, get_args

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
"""Traced part of a step: all, all but the optimizer, or a forward pass in evaluation mode."""


class Adaptation(NamedTuple):
    """Adapter training, in which a model's own weights are frozen.

    Attributes:
        adapter: lora, dora, or "".
        rank: Rank of the adapters.
        targets: Names of linear layers, separated by commas, or all-linear.
        dropout: Dropout of the adapters.
        weights: Format of the frozen weights: nf4, fp4, nf4_double (with quantised scales), gptq,
            or "" for that of the form.
        fp32_weights: Weights beside packed ones that stay in fp32 when training in 16 bits: all,
            norms or none.
        whole: Names of modules that are trained whole beside the adapters, separated by commas.
        as_the_model: True if adapters of a 16-bit model are in 16 bits too (peft before 0.12,
            DeepSpeed's bf16 engine, autocast_adapter_dtype=False). Newer peft keeps them in fp32.
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
        """Description such as "LoRA of rank 16 over nf4, all other weights in fp32", or ""."""
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
ADAPTERS = ("lora", "dora")
FP32_IN_WORDS = {
    "all": "all other weights in fp32",
    "norms": "norms in fp32",
    "none": "all other weights in 16 bits",
}


class Variant(NamedTuple):
    """A workload among those of a model spec.

    Attributes:
        optimizer: Name of the optimizer. None: the model's usual one.
        sequence_length: Tokens per sample.
        image_size: Side of images in pixels.
        mode: Part of a step.
        legacy: torch before 2.0: no fused attention, and optimizers launch kernels per tensor.
        checkpointing: Recompute activations in the backward pass, block by block.
        cpu: What torch runs on a CPU: dropout in three operators, attention with dropout not
            fused, optimizers tensor by tensor.
        adaptation: Adapters and quantised weights.
        autocast: A model in 16 bits runs under torch.autocast, as transformers' Trainer does with
            bf16=True for a model loaded in bfloat16.
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
"""The whole training step of a spec."""

LARGEST = 1e25
"""Limit for FLOPs and bytes, so that products stay finite. NaN fails the comparison too."""

MATRIX_KINDS = frozenset(name for name, kind in KINDS.items() if kind.is_matrix)
"""Operators on matrix units. Others are limited by memory traffic or by their launch."""

ATTENTION_BACKWARD_MODEL_SHARE = 0.8
"""MFU counts 4 of 5 matmuls in FlashAttention's backward; one is recomputed (Dao et al. 2022)."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]


class GemmSizes(NamedTuple):
    """`batch` matmuls of m x k by k x n.

    In a table m, n or k may be fractional: the rows per group of a grouped matmul, divided evenly.
    """

    batch: int
    m: int
    n: int
    k: int


class ConvSizes(NamedTuple):
    """A convolution in up to three dimensions. channels_last: 1 if its input is so already."""

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
    """Fused attention.

    Attributes:
        batch, heads: Number of sequences, and of heads.
        queries, keys: Lengths.
        head_size: Width of queries and keys.
        causal: 0 or 1.
        value_size: Width of values; 0 if it is `head_size`.
        seen: Mean number of keys that a query sees, possibly fractional, if the kernel skips
            masked blocks; else 0.
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
    """All other operators. extent: length of a normalized row, or elements of a pooling window."""

    elements_in: int
    elements_out: int
    extent: int = 0


MOST_SIZES = 16
"""Columns for the sizes of an operator in the table, padded with zeros."""
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
"""Function that computes all experts in one call (torch.nn.functional.grouped_mm)."""


def form_of(precision: Precision) -> Form:
    """Return the form that a forecast in `precision` needs."""
    return NUMBER_FORMATS[precision].form


def attention_widths(kind: str, head_size: Floats, value_size: Floats) -> Floats:
    """Return the multiplications per score in fused attention (FlashAttention, arXiv:2205.14135).

    Forward: matmuls with keys and values. Backward: queries with keys again, both their gradients,
    and values with their gradients.
    """
    return (
        3.0 * head_size + 2.0 * value_size
        if kind == "attention_backward"
        else 1.0 * (head_size + value_size)
    )


class Operators(Record):
    """Table of n rows of equal operators, as a struct of arrays in no particular order.

    Attributes:
        kind, function, phase, module: n strings. function is ATen's name, module the first one's.
        half: True for arithmetic in 16 bits.
        count: Operators of each row.
        launches: Kernels of one operator; 0 if only the host works.
        flops, read_bytes, written_bytes: n x 2 coefficients over the batch size.
        dims: n x 16 x 2. Sizes in the order of `GemmSizes`, `ConvSizes`, `AttentionSizes` or
            `OtherSizes`, padded with zeros.
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
        if (self.count < 1).any() or (self.launches < 0).any():
            raise TrainpaceError("the operator table has a count below 1 or negative launches.")
        self._check_sizes()

    def _check_words(self) -> None:
        if not set(self.phase) <= set(PHASES):
            raise TrainpaceError("the operator table has an unknown phase.")
        unknown = set(self.kind) - set(KINDS)
        if unknown:
            raise TrainpaceError(
                f"the operator table has an operator of kind {min(unknown)!r}.",
                f"Kinds: {', '.join(sorted(KINDS))}.",
            )

    def _check_sizes(self) -> None:
        """Check that FLOPs agree with sizes: times follow from sizes, utilization from FLOPs."""
        batch = 2
        d = self.dims[:, :, 0] + self.dims[:, :, 1] * batch
        flops = self.flops[:, 0] + self.flops[:, 1] * batch
        kind = np.array(self.kind)
        convolution, attention = np.isin(kind, CONVOLUTION_KINDS), np.isin(kind, ATTENTION_KINDS)
        groups = np.where(convolution, np.maximum(d[:, CONV.groups], 1), 1)
        work = (
            d[:, CONV.images]
            * d[:, CONV.c_in]
            * d[:, CONV.c_out]
            / groups
            * d[:, CONV_KERNEL].prod(axis=1)
        )
        all_keys = d[:, ATTENTION.keys] * np.where(d[:, ATTENTION.causal] > 0, 0.5, 1.0)
        seen = np.where(d[:, ATTENTION.seen] > 0, d[:, ATTENTION.seen], all_keys)
        scores = d[:, ATTENTION[: ATTENTION.keys]].prod(axis=1) * seen
        heads, values = d[:, ATTENTION.head_size], d[:, ATTENTION.value_size]
        widths = [
            attention_widths(name, heads, np.where(values > 0, values, heads))
            for name in ATTENTION_KINDS
        ]
        expected = 2.0 * np.select(
            [kind == "gemm", attention],
            [d[:, GEMM].prod(axis=1), scores * np.where(kind == "attention", *widths)],
            work * d[:, CONV_OUT].prod(axis=1),
        )
        # a transposed convolution works at every position of its input
        other = np.where(convolution, 2.0 * work * d[:, CONV_IN].prod(axis=1), expected)
        wrong = (convolution | attention | (kind == "gemm")) & ~(
            np.isclose(flops, expected, rtol=1e-3) | np.isclose(flops, other, rtol=1e-3)
        )
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise TrainpaceError(
                f"the FLOPs of operator {i} of the table, a {self.kind[i]}, do not match its sizes."
            )

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def is_matrix(self) -> Flags:
        """True for rows on matrix units."""
        return np.isin(self.kind, list(MATRIX_KINDS))

    def moved_bytes(self, batch: int | Floats) -> Floats:
        """Return the bytes that one operator of each row reads and writes."""
        return at_batch(self.read_bytes, batch) + at_batch(self.written_bytes, batch)


_COEFFICIENTS = ("flops", "read_bytes", "written_bytes")


def _check_array(
    array: np.ndarray, shape: tuple[int | None, ...], name: str, is_flag: bool = False
) -> None:
    """Raise TrainpaceError unless an array has a shape (None: any length) and finite numbers."""
    fits = len(array.shape) == len(shape) and all(
        wanted in (None, n) for n, wanted in zip(array.shape, shape, strict=True)
    )
    is_kind = array.dtype.kind in ("b" if is_flag else "if")
    if not fits or not is_kind or not (np.abs(array) < LARGEST).all():
        words = ", ".join("n" if n is None else str(n) for n in shape)
        raise TrainpaceError(f"{name} should be finite numbers of shape ({words}).")


class MemoryProfile(Record):
    """Bytes alive on one device: states that stay, and the moments that can be the peak of a step.

    Attributes:
        parameter_bytes: Parameters and buffers.
        optimizer_bytes: Optimizer states.
        peaks: k x 3. Gradient bytes, activation bytes with temporaries (constant, per sample). Only
            moments that are the highest for some batch size.
        moments: m x 5, for a chart; may be empty. Phase (index in PHASES), share of the phase's
            bytes moved by then, and the same three.
        paged_bytes: Further optimizer states that CUDA pages to the host if the device is full.
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
"""Division of an operator by tensor parallelism.

column: its weight is divided by outputs, so it reads a whole input and writes a part. row: by
inputs, so results are summed over the ranks. sharded: works on results of column. expert: works on
results of experts, whose matmuls are grouped; expert parallelism sends its rows to other ranks.
replicated: norms, residuals and dropout in between, which sequence parallelism divides. "":
outside."""


class Blocks(Record):
    """The longest chain of equal modules (the layers of a transformer).

    Pipelines, tensor parallelism and recomputation divide a model along it. Pairs of bytes are
    affine in the batch size: (constant, per sample).

    Attributes:
        module: Name of the chain.
        count: Number of blocks.
        heads, key_value_heads: Heads of attention; 0 without attention.
        parameters: Parameters of one block.
        tensor_parameters: Part of them that tensor parallelism divides.
        outside_parameters: Parameters before and after the blocks.
        outside_tensor_parameters: Part of them in the weights of the vocabulary.
        tied_parameters: Counted once outside, but needed at both ends of a pipeline.
        operator_counts: Operators of each row inside the blocks, for all blocks.
        roles: Role of each row. Rows outside have one too if they can be divided (the embedding
            and the head of the vocabulary).
        input_bytes: Hidden state that enters a block.
        saved_bytes: What a block saves for its backward pass, including its input.
        sharded_saved_bytes: Part of it that tensor parallelism divides without sequence
            parallelism.
        attention_saved_bytes: Part of it that selective recomputation drops.
        working_bytes: Peak in a block's backward pass beyond saved bytes and gradients.
        outside_saved_bytes: Saved outside the blocks (embedding, head, loss).
        after_saved_bytes: Part of it made after the blocks, freed before their backward pass.
        after_working_bytes: Peak after the blocks, in head and loss, beyond saved bytes and
            gradients.
        experts: Experts per block; 0 without grouped matmuls.
        expert_parameters: Parameters of the experts of a block, not in tensor_parameters.
        dispatched_bytes: Rows that one block's router sends to experts; each token counts once per
            expert.
        expert_saved_bytes: Part of saved_bytes made by experts.
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

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in self.__struct_fields__}
        numbers = [size for size in sizes.values() if isinstance(size, int)]
        if any(not 0 <= size < LARGEST for size in numbers) or self.count < 1:
            raise TrainpaceError("the repeated blocks need finite counts, and at least one block.")
        divided = self.tensor_parameters + self.expert_parameters
        if divided > self.parameters or self.outside_tensor_parameters > self.outside_parameters:
            raise TrainpaceError("the repeated blocks divide more parameters than they have.")
        self._check_bytes([size for name, size in sizes.items() if name.endswith("_bytes")])
        self._check_heads()
        self._check_counts()

    @staticmethod
    def _check_bytes(pairs: list[tuple[float, float]]) -> None:
        if not (np.abs(pairs) < LARGEST).all() or (np.sum(pairs, axis=1) < 0).any():
            raise TrainpaceError("the bytes of the repeated blocks must be finite, and at least 0.")

    def _check_heads(self) -> None:
        heads, of_keys = self.heads, self.key_value_heads
        if (heads == 0) != (of_keys == 0) or heads % max(of_keys, 1):
            raise TrainpaceError(
                "the heads of the repeated blocks are not a multiple of their key-value heads."
            )

    def _check_counts(self) -> None:
        counts = self.operator_counts
        fits = counts.shape == (len(self.roles),) and counts.dtype.kind in "iu"
        if not fits or (counts < 0).any():
            raise TrainpaceError(
                "the repeated blocks need a count and a role for every row of the operator table."
            )


class TracedForm(Record):
    """Operators and memory in one number form, and the repeated blocks, if any."""

    operators: Operators
    memory: MemoryProfile
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        if self.blocks is None:
            return
        counts = self.blocks.operator_counts
        if counts.shape != self.operators.count.shape or (counts > self.operators.count).any():
            raise TrainpaceError("the repeated blocks do not belong to this operator table.")


class TrainedShape(Record):
    """Trainable parameters of one shape.

    Attributes:
        sizes: The shape.
        is_vocabulary: True for the table of an embedding, or a head over as many words.
        count: Number of such parameters.
        is_fp32: True if they are in fp32 in every form, like adapters.
    """

    sizes: tuple[int, ...]
    is_vocabulary: bool
    count: int
    is_fp32: bool = False


class Workload(Record):
    """One model with its loss and optimizer, independent of any device.

    Attributes:
        sample_bytes: Bytes per sample, in all `batch_tensors` tensors of a batch (images, labels).
        notes: Assumptions and omissions of the trace. Every answer repeats them.
        settings: Fields of `Execution` from the task's own loader or trainer, as defaults.
        whole_step: True if the step makes its own updates, once or more.
        assumes_optimizer: True if nobody chose the optimizer.
        adaptation: Description of adapters and quantised weights.
        trained: Shapes of trainable parameters, for another optimizer.
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
        """The only batch size for which the workload holds, or None if it holds for any."""
        return self.traced_batches[0] if len(self.traced_batches) == 1 else None

    @property
    def has_experts(self) -> bool:
        """True for layers of experts with grouped matmuls."""
        return any(GROUPED in form.operators.function for form in self.forms.values())

    @property
    def image_side(self) -> int | None:
        """Side of the traced square images, or None for other samples."""
        square = re.search(r"\b(\d+) x \1 image$", self.sample)
        return int(square[1]) if square else None

    def form(self, precision: Precision) -> TracedForm:
        """Return the traced form for a precision. Raises TrainpaceError if it was not traced."""
        wanted = form_of(precision)
        if wanted not in self.forms:
            raise TrainpaceError(
                f"this workload of {self.model} was traced for {', '.join(self.forms)}, and"
                f" {precision} needs {wanted!r}.",
                "Trace the model again: `save_workload` stores every form.",
            )
        return self.forms[wanted]


def at_batch(coefficients: Floats, batch: int | Floats) -> Floats:
    """Evaluate n x 2 coefficients at a batch size, or at batch sizes that broadcast against n."""
    return coefficients[..., 0] + coefficients[..., 1] * batch


def multiplies_activations(operators: Operators) -> Flags:
    """Return True for matmuls of two activations, whose number grows with the batch."""
    return (np.array(operators.kind) == "gemm") & (operators.dims[:, GEMM.batch, 1] > 0)
