"""What one micro-batch computes, as a table whose every number is an affine function of the batch size.

A quantity is stored as two coefficients, constant and per sample: ``value(batch) = c[0] + c[1] * batch``. Alike
operators share a row with a `count`; so ResNet-50 is about 200 rows, and Llama-70B not many more.
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
"""How much of a step was traced: all of it, all but the optimizer, or a forward pass in evaluation mode."""


class Adaptation(NamedTuple):
    """How a model is trained without training its own weights. adapter: lora or dora, "" for none. rank, dropout: of the
    adapters. targets: names of linear layers, separated by commas, or all-linear. weights: the format of the frozen weights:
    nf4, fp4, nf4_double (with quantised scales), gptq, "" as the form has them. fp32_weights: which weights beside packed ones
    are in fp32 while training in 16 bits: all, norms or none. whole: names of modules that are trained whole beside the adapters,
    separated by commas. as_the_model: adapters of a 16-bit model are in 16 bits too (peft before 0.12, DeepSpeed's bf16 engine,
    autocast_adapter_dtype=False); peft of today keeps them in fp32."""

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
        """Such as "LoRA of rank 16 over nf4, all other weights in fp32"; empty where a model is trained as it is."""
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
    """Which of a spec's workloads: its input's size, how much of a step, and under which generation of torch.

    `legacy` is torch before 2.0: no fused attention, and optimizers that launch kernels tensor by tensor. `checkpointing`
    recomputes activations in the backward pass, block by block. `cpu`: what torch runs on a CPU, where dropout is three
    operators, attention with dropout is not fused, and optimizers go from tensor to tensor. `autocast`: a model in 16 bits runs
    under torch.autocast, as transformers' Trainer has it with bf16=True over a model that was loaded in bfloat16.
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
"""A whole training step as the spec has it."""

LARGEST = 1e25
"""FLOPs or bytes above this are no model's; it keeps every product finite. A comparison with NaN fails too."""

MATRIX_KINDS = frozenset(name for name, kind in KINDS.items() if kind.is_matrix)
"""Operators that run on matrix units. All others are bound by memory traffic or by their launch."""

ATTENTION_BACKWARD_MODEL_SHARE = 0.8
"""FlashAttention's backward does 5 products, one of them the forward's again: MFU counts 4 (Dao et al. 2022)."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]


class GemmSizes(NamedTuple):
    """`batch` products of m x k by k x n. In a table one of m, n, k may be no whole number: the rows of each group where
    those of a grouped product are divided evenly."""

    batch: int
    m: int
    n: int
    k: int


class ConvSizes(NamedTuple):
    """A convolution in up to three dimensions; channels_last: 1 where its input is so already."""

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
    """Fused attention; queries and keys are lengths, causal is 0 or 1. value_size: of values, 0 where it is head_size. seen: keys
    that a query sees, where the kernel skips what a window or a block mask leaves out: a mean, and no whole number; else 0.
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
    """All other operators. extent: length of a row that is normalised, elements of a pooling window, 0 for the rest."""

    elements_in: int
    elements_out: int
    extent: int = 0


MOST_SIZES = 16
"""Sizes of one operator in the table at most; the rest is padded with zeros."""
GEMM, CONV = GemmSizes(*range(4)), ConvSizes(*range(16))
ATTENTION, OTHER = AttentionSizes(*range(8)), OtherSizes(*range(3))
"""Where each size of a kind stands in `Operators.dims`: `dims[:, GEMM.m]`."""
CONV_OUT, CONV_IN = slice(CONV.out_d, CONV.out_w + 1), slice(CONV.in_d, CONV.in_w + 1)
CONV_KERNEL, CONV_STRIDE = (
    slice(CONV.kernel_d, CONV.kernel_w + 1),
    slice(CONV.stride_h, CONV.stride_w + 1),
)
CONVOLUTION_KINDS = ("conv", "conv_dgrad", "conv_wgrad")
ATTENTION_KINDS = ("attention", "attention_backward")
GROUPED = "_grouped_mm"
"""The function of products of all experts in one call (torch.nn.functional.grouped_mm)."""


def form_of(precision: Precision) -> Form:
    """The form in which a workload must have been traced to be forecast in `precision`."""
    return NUMBER_FORMATS[precision].form


def attention_widths(kind: str, head_size: Floats, value_size: Floats) -> Floats:
    """Multiplications that each score costs in fused attention: forward the products with keys and with values; backward those of
    queries and keys, again and for both gradients, and of values and their gradients (FlashAttention, arXiv:2205.14135).
    """
    return (
        3.0 * head_size + 2.0 * value_size
        if kind == "attention_backward"
        else 1.0 * (head_size + value_size)
    )


class Operators(Record):
    """A struct of arrays; n rows of alike operators, heaviest order not implied.

    kind, function, phase, module: n strings (function is ATen's name, module the first one's). half: does its arithmetic
    run in 16 bits. count: n. launches: kernels of one operator, n (0: the host's work alone). flops, read_bytes,
    written_bytes: n x 2 coefficients over the batch size. dims: n x 16 x 2, the operator's own sizes in the order
    of `GemmSizes`, `ConvSizes`, `AttentionSizes` or `OtherSizes`, zero-padded.
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
        shapes = {
            "half": (n,),
            "count": (n,),
            "launches": (n,),
            "flops": (n, 2),
            "read_bytes": (n, 2),
        }
        shapes |= {"written_bytes": (n, 2), "dims": (n, MOST_SIZES, 2)}
        if n == 0 or any(len(names) != n for names in (self.function, self.phase, self.module)):
            raise TrainpaceError("the operator table is empty, or its columns differ in length.")
        for name, shape in shapes.items():
            array = getattr(self, name)
            kinds = "b" if name == "half" else "if"
            if (
                array.shape != shape
                or array.dtype.kind not in kinds
                or not (np.abs(array) < LARGEST).all()
            ):
                raise TrainpaceError(
                    f"column {name} of the operator table should be finite numbers of shape"
                    f" {shape}."
                )
        if any(
            (getattr(self, name).sum(axis=1) < 0).any()
            for name in ("flops", "read_bytes", "written_bytes")
        ):
            raise TrainpaceError(
                "the operator table has an operator that does less than nothing at batch size 1."
            )
        if (
            any(phase not in PHASES for phase in self.phase)
            or (self.count < 1).any()
            or (self.launches < 0).any()
        ):
            raise TrainpaceError("the operator table has an unknown phase, or a count below 1.")
        unknown = set(self.kind) - set(KINDS)
        if unknown:
            raise TrainpaceError(
                f"the operator table has an operator of kind {min(unknown)!r}.",
                f"Kinds: {', '.join(sorted(KINDS))}.",
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Times of matrix operators follow from their sizes, and utilisation from their FLOPs: the two must agree."""
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
                f"operator {i} of the table, of kind {self.kind[i]}, has other FLOPs than its sizes"
                " make."
            )

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def is_matrix(self) -> Flags:
        """Which rows run on matrix units."""
        return np.isin(self.kind, list(MATRIX_KINDS))

    def moved_bytes(self, batch: int | Floats) -> Floats:
        """Bytes that one operator of each row reads and writes."""
        return at_batch(self.read_bytes, batch) + at_batch(self.written_bytes, batch)


class MemoryProfile(Record):
    """Bytes alive on one device: states that stay, and the moments of a step that can be its peak.

    paged_bytes: of further optimizer states, in memory that CUDA pages to the host where the device is full. frozen_bytes: of
    parameters that are not trained, among parameter_bytes.

    peaks: k x 3: gradient bytes, activation bytes (constant), activation bytes per sample, activations including temporaries.
    Only moments that are the highest for some batch size are kept. moments: m x 5, for a chart: some moments of the step in
    order, each with its phase (its place in PHASES), the share of the phase's bytes moved by then, and the same three; there may
    be none.
    """

    parameter_bytes: float
    optimizer_bytes: float
    peaks: np.ndarray
    moments: np.ndarray = msgspec.field(default_factory=lambda: np.zeros((0, 5)))
    paged_bytes: float = 0.0
    frozen_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name, array, columns in (("peaks", self.peaks, 3), ("moments", self.moments, 5)):
            if not array.size and name == "moments":
                continue
            if (
                array.ndim != 2
                or array.shape[1] != columns
                or not array.size
                or not (np.abs(array) < LARGEST).all()
            ):
                raise TrainpaceError(
                    f"the memory profile's {name} should be finite numbers of shape (n, {columns})."
                )


Role = Literal["", "column", "row", "sharded", "expert", "replicated"]
"""What tensor parallelism does to an operator. column: its weight is divided by outputs, so that it reads a whole input and
writes a part. row: by inputs, so that its results have to be summed over the ranks. sharded: it works on what column wrote;
expert: on what experts wrote, whose products are grouped, so that expert parallelism sends its rows to other ranks.
replicated: norms, residuals and dropout between them, which sequence parallelism divides. "": outside."""


class Blocks(Record):
    """The longest chain of alike modules (a transformer's layers), along which pipelines, tensor parallelism and
    recomputation cut. Bytes are affine in the batch size (constant, per sample) where they are pairs.

    operator_counts: n, how many of each row's operators run inside the blocks, all blocks together. roles: n, see `Role`; rows
    outside of the blocks have one too where they can be divided (the vocabulary's embedding and head). heads, key_value_heads: of
    attention, 0 where there is none. parameters: numbers in one block; tensor_parameters: those in weights that tensor
    parallelism divides. outside_parameters: before and after the blocks, outside_tensor_parameters: those in the vocabulary's
    weights; tied_parameters: counted once among them, but needed at both ends of a pipeline. input_bytes: the hidden state that
    enters a block. saved_bytes: what one block keeps from its forward to its backward pass, its input included;
    sharded_saved_bytes: the part of it that tensor parallelism divides without sequence parallelism; attention_saved_bytes: the
    part that selective recomputation gives up. working_bytes: the most that is alive in a block's backward pass beyond what is
    saved and beyond gradients. outside_saved_bytes: kept outside of the blocks (embedding, head, loss); after_saved_bytes: the
    part of it that is made after the blocks, and gone when their backward pass begins; after_working_bytes: the most that is
    alive after the blocks, in their head and loss, beyond all that is saved and beyond gradients.

    experts: of one block, 0 where none has grouped products. expert_parameters: numbers in their weights and biases, which
    tensor_parameters leave out. dispatched_bytes: the rows that one block's router sends to experts, each token once for each of
    its experts. expert_saved_bytes: the part of saved_bytes that experts make.
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
            raise TrainpaceError(
                "the repeated blocks need finite counts from 0, and one block at least."
            )
        divided = self.tensor_parameters + self.expert_parameters
        if divided > self.parameters or self.outside_tensor_parameters > self.outside_parameters:
            raise TrainpaceError("the repeated blocks divide more parameters than they have.")
        if (self.heads == 0) != (self.key_value_heads == 0) or self.heads % max(
            self.key_value_heads, 1
        ):
            raise TrainpaceError(
                "the heads of the repeated blocks are no multiple of their key-value heads."
            )
        pairs = [size for name, size in sizes.items() if name.endswith("_bytes")]
        if not (np.abs(pairs) < LARGEST).all() or (np.sum(pairs, axis=1) < 0).any():
            raise TrainpaceError(
                "the bytes of the repeated blocks should be finite numbers, and not below 0."
            )
        counts = self.operator_counts
        if (
            counts.shape != (len(self.roles),)
            or counts.dtype.kind not in "iu"
            or (counts < 0).any()
        ):
            raise TrainpaceError(
                "the repeated blocks need a count and a role for every row of the operator table."
            )


class TracedForm(Record):
    """The operators and memory of one number form, and the repeated blocks where the model has any."""

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
    """Trainable parameters of one shape, and how many there are. is_vocabulary: an embedding's table, or a head over as many
    words. is_fp32: also where the form's weights have 16 bits, as adapters are."""

    sizes: tuple[int, ...]
    is_vocabulary: bool
    count: int
    is_fp32: bool = False


class Workload(Record):
    """One model with its loss and optimizer, independent of any device. A batch is `batch_tensors` tensors, such as images and
    labels, of `sample_bytes` a sample in all.

    notes: sentences about what the trace took for granted or left out, which every answer about the workload repeats. settings:
    what the task's own loader or trainer says of an `Execution`, by the names of its fields, for requests that leave it open.
    whole_step: its step makes its own updates, once or more. assumes_optimizer: nobody named it, and it is the usual one.
    adaptation: how it is trained without training its own weights. trained: shapes of its parameters, for another optimizer.
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
        """The batch size at which alone it was traced, and holds; None where it holds at any."""
        return self.traced_batches[0] if len(self.traced_batches) == 1 else None

    @property
    def has_experts(self) -> bool:
        """Does it have layers of experts, whose products are grouped?"""
        return any(GROUPED in form.operators.function for form in self.forms.values())

    @property
    def image_side(self) -> int | None:
        """The side of the square images that it was traced with; None for other samples."""
        square = re.search(r"\b(\d+) x \1 image$", self.sample)
        return int(square[1]) if square else None

    def form(self, precision: Precision) -> TracedForm:
        """The traced form for a precision, or an error that says which were traced."""
        wanted = form_of(precision)
        if wanted not in self.forms:
            raise TrainpaceError(
                f"this workload of {self.model} was traced for {', '.join(self.forms)}, and"
                f" {precision} needs {wanted!r}.",
                "Trace it again from the model: `save_workload` stores every form.",
            )
        return self.forms[wanted]


def at_batch(coefficients: Floats, batch: int | Floats) -> Floats:
    """Evaluate n x 2 coefficients at a batch size, or at batch sizes that broadcast against n."""
    return coefficients[..., 0] + coefficients[..., 1] * batch


def multiplies_activations(operators: Operators) -> Flags:
    """Products of two activations, as in attention: there is one a sample, so their number grows with the batch."""
    return (np.array(operators.kind) == "gemm") & (operators.dims[:, GEMM.batch, 1] > 0)
