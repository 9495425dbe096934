"""Settings of a step's execution: batches, parallelism, precision, memory savings and optimizer.

A *micro-batch* contains the samples that one data-parallel rank processes in one forward and
backward pass. The *global batch* (effective batch) contains the samples of one optimizer update.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from trainpace.core.errors import Contradiction, UnknownName
from trainpace.core.records import Record, check_fields

Precision = Literal["fp32", "torch_fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16", "fp8"]
"""Number format of weights and matmuls.

- fp32: Everything in fp32, with TF32 off.
- torch_fp32: torch's default. Convolutions run in TF32 on cards that support it
  (`torch.backends.cudnn.allow_tf32`), everything else in fp32.
- tf32: fp32 storage with matmuls in TF32.
- amp_fp16, amp_bf16: fp32 weights under autocast (FSDP: MixedPrecision).
- bf16, fp16: Weights, gradients and activations in this format. The engine decides the format of
  the optimizer states (`trainpace.forecast.memory`).
- fp8: bf16 with matmuls in FP8.
"""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

Form = Literal["fp32", "amp", "half"]
"""Number format of a trace. The casts differ between the formats, so each is traced separately.

- fp32: Everything in fp32.
- amp: fp32 weights under autocast.
- half: Weights and activations in a 16-bit format.
"""
FORMS: tuple[Form, ...] = get_args(Form)


class NumberFormat(NamedTuple):
    """Number formats of a precision.

    Attributes:
        form: Number format of the trace.
        products: Number format of matmuls.
        convolutions: Number format of convolutions with fp32 inputs.
    """

    form: Form
    products: Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
    convolutions: Literal["fp32", "tf32"] = "fp32"

    @property
    def autocasts(self) -> bool:
        return self.form == "amp"


NUMBER_FORMATS: dict[Precision, NumberFormat] = {
    "fp32": NumberFormat("fp32", "fp32"),
    "torch_fp32": NumberFormat("fp32", "fp32", "tf32"),
    "tf32": NumberFormat("fp32", "tf32", "tf32"),
    "amp_fp16": NumberFormat("amp", "fp16"),
    "amp_bf16": NumberFormat("amp", "bf16"),
    "bf16": NumberFormat("half", "bf16"),
    "fp16": NumberFormat("half", "fp16"),
    "fp8": NumberFormat("half", "fp8"),
}
"""Number formats by precision."""

ZeroStage = Literal[0, 1, 2, 3]

Engine = Literal["ddp", "unoverlapped", "data_parallel", "megatron_core"]
"""Engine that communicates gradients and parameters.

- ddp: One process per device. Gradients are reduced during the backward pass. FSDP and ZeRO shard
  on top of it.
- unoverlapped: Like ddp, but gradients are reduced after the backward pass.
- data_parallel: torch's old nn.DataParallel, with one process for all devices of a node.
- megatron_core: Like ddp, with more overlap. ZeRO 1 gathers parameters during the next forward
  pass, interleaved stages compute while they send, and with sequence parallelism, tensor-parallel
  communication is hidden (--overlap-param-gather, --overlap-p2p-communication, --tp-comm-overlap,
  which NeMo's recipes set).
"""

Checkpointing = Literal["none", "selective", "full"]
"""Activations that are recomputed in the backward pass.

- none: No activations.
- selective: Large activations that are cheap to recompute: the matmuls inside attention
  (Korthikanti et al. 2022).
- full: All activations except the input of each repeated block.
"""

ExpertExchange = Literal["all_to_all", "deep_ep", "overlapped"]
"""Communication that sends tokens to the ranks of their experts and back.

- all_to_all: NCCL's all-to-all. Each token is sent once per expert, and computation waits.
- deep_ep: DeepSeek's DeepEP. Each token is sent once to every rank with one of its experts, and
  once per node over the network.
- overlapped: deep_ep during the computation of another micro-batch (Megatron-Core's
  --overlap-moe-expert-parallel-comm).
"""

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]
"""Order of the forward and backward passes in a pipeline.

- gpipe: All forward passes, then all backward passes.
- 1f1b: Forward and backward passes alternate, so fewer activations are stored.
- interleaved: 1f1b with several smaller stages per device (`virtual_stages`; Narayanan et al.
  2021).
"""


def _help(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class Execution(Record):
    """Settings to execute a workload. All counts are 1 or more.

    The number of data-parallel ranks is world size / (`tp` x `pp` x `cp`). Several nodes do not
    imply pipeline stages, and several GPUs per node do not imply tensor-parallel ranks.

    Expert parallelism does not reduce the number of data-parallel ranks. In each pipeline stage,
    `ep` x `expert_tp` ranks share the experts. The stage therefore has world size / (pp x ep x
    expert_tp) copies of its experts (Megatron-Core's parallel folding, arXiv:2504.14960).

    Some settings in more detail than their help texts:

    - `expert_load`: Load of the busiest ep rank divided by the mean. 1 for a balanced router.
    - `expert_nodes`: Maximum number of nodes with experts of one token (DeepSeek-V3's node-limited
      routing).
    - `zero_stage`: Stage 1 shards optimizer states, stage 2 also gradients, and stage 3 (FSDP) also
      parameters. They are sharded over the data-parallel ranks, or over `shard_size` of them
      (hybrid sharding).
    - `reshard_after_forward`: If False, FSDP stores the gathered parameters until the backward pass
      (SHARD_GRAD_OP).
    - `sequence_parallel`: Splits norms and residuals along the sequence over the tensor-parallel
      ranks.
    - `partition_activations`: Splits the activations of full checkpointing over the tensor-parallel
      ranks, and gathers them before a block is recomputed (DeepSpeed's ZeRO-R).
    - `async_tensor_parallel`: Splits matmuls to hide their communication.
    - `pure_16_bit`: Sharded 16-bit weights have no fp32 copy, and optimizer states are in 16 bits
      (FSDP of a model loaded in 16 bits).
    """

    micro_batch: Annotated[int, _help("Samples per GPU in one forward pass.")] = 1
    accumulation: Annotated[int, _help("Micro-batches per update.")] = 1
    nnodes: Annotated[int, _help("Nodes.")] = 1
    nproc_per_node: Annotated[int, _help("GPUs per node, with one process each.")] = 1
    tp: Annotated[int, _help("Tensor-parallel ranks.")] = 1
    pp: Annotated[int, _help("Pipeline stages.")] = 1
    cp: Annotated[int, _help("Context-parallel ranks, which divide the sequence.")] = 1
    precision: Annotated[Precision, _help("Number format of weights and matmuls.")] = "fp32"
    optimizer: Annotated[str, _help("Optimizer.")] = "sgd"
    engine: Annotated[
        Engine,
        _help(
            "How gradients and parameters are communicated: during the backward pass (ddp; FSDP and"
            " ZeRO shard on top of it), after it (unoverlapped), by torch's old DataParallel, or"
            " with Megatron-Core's overlaps."
        ),
    ] = "ddp"
    zero_stage: Annotated[ZeroStage, _help("ZeRO stage; 3 is FSDP.")] = 0
    shard_size: Annotated[
        int | None, _help("Data-parallel ranks that share one set of states (hybrid sharding).")
    ] = None
    reshard_after_forward: Annotated[
        bool, _help("Free gathered parameters after the forward pass (FSDP).")
    ] = True
    offload_optimizer: Annotated[
        bool, _help("Keep optimizer states and the update on the host.")
    ] = False
    offload_parameters: Annotated[bool, _help("Keep parameters on the host (ZeRO 3).")] = False
    activation_checkpointing: Annotated[
        Checkpointing, _help("Activations to recompute in the backward pass.")
    ] = "none"
    sequence_parallel: Annotated[
        bool, _help("Divide norms and residuals over the tensor-parallel ranks too.")
    ] = False
    partition_activations: Annotated[
        bool,
        _help(
            "Divide checkpointed activations over the tensor-parallel ranks (DeepSpeed's ZeRO-R)."
        ),
    ] = False
    async_tensor_parallel: Annotated[
        bool, _help("Hide part of tensor parallelism's communication behind its matmuls.")
    ] = False
    clip_gradients: Annotated[
        bool, _help("Clip gradients to a maximum norm before the update (clip_grad_norm_).")
    ] = False
    pure_16_bit: Annotated[
        bool,
        _help(
            "Train sharded 16-bit weights without an fp32 copy, with 16-bit optimizer states (a"
            " model loaded in 16 bits)."
        ),
    ] = False
    pipeline_schedule: Annotated[
        PipelineSchedule, _help("Order of the pipeline's forward and backward passes.")
    ] = "1f1b"
    virtual_stages: Annotated[int, _help("Stages per device of an interleaved pipeline.")] = 1
    ep: Annotated[int, _help("Expert-parallel ranks, which divide the experts of each layer.")] = 1
    expert_tp: Annotated[
        int | None, _help("Tensor-parallel ranks of each expert.  [default: tp]")
    ] = None
    expert_exchange: Annotated[
        ExpertExchange,
        _help(
            "How tokens reach the ranks of their experts: NCCL's all-to-all, DeepEP, or overlapped"
            " with computation."
        ),
    ] = "all_to_all"
    expert_load: Annotated[
        float,
        _help(
            "Tokens of the busiest expert-parallel rank over the mean: 1 for a balanced router, up"
            " to ep."
        ),
    ] = 1.0
    expert_nodes: Annotated[
        int | None, _help("Most nodes that the experts of one token may be on.  [default: any]")
    ] = None
    compile: Annotated[bool, _help("Run under torch.compile.")] = False
    channels_last: Annotated[
        bool, _help("Use NHWC tensors (memory_format=torch.channels_last).")
    ] = False

    def __post_init__(self) -> None:
        check_fields(self, _COUNTS, lambda count: count >= 1, "a whole number from 1")
        check_fields(
            self,
            ("expert_load",),
            lambda load: 1 <= load <= self.ep,
            "from 1 to ep (one rank gets all tokens)",
        )
        optional = "expert_nodes", "expert_tp", "shard_size"
        check_fields(self, optional, lambda count: count >= 1, "1 or more")
        for rule in EXECUTION_RULES:
            if rule.is_broken(self, None):
                raise Contradiction(*rule.words(self, None))

    def has(self, name: str, value: Any) -> bool:
        """Return True if a field has a value. `Grid` has the same method for arrays."""
        return bool(getattr(self, name) == value)

    @property
    def world_size(self) -> int:
        """Number of processes, one per GPU."""
        return self.nnodes * self.nproc_per_node

    @property
    def ranks_per_copy(self) -> int:
        """Number of ranks that divide one copy of the model among them: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that process different samples: world size / (tp x pp x cp)."""
        return self.world_size // self.ranks_per_copy

    @property
    def experts_tp(self) -> int:
        """Number of tensor-parallel ranks of each expert."""
        return self.expert_tp or self.tp

    @property
    def shard_ranks(self) -> int:
        """Number of data-parallel ranks over which states are sharded."""
        return self.shard_size or self.data_parallel_size

    @property
    def global_batch(self) -> int:
        """Samples per optimizer update: micro-batch x accumulation x data-parallel size."""
        return self.micro_batch * self.accumulation * self.data_parallel_size


class Rule(NamedTuple):
    """Condition that the settings of an execution must meet.

    Attributes:
        name: Name of the rule.
        is_broken: Function of (execution, context) that is True if the rule is broken. The
            execution may also be a `trainpace.forecast.Grid`, an array of executions with the same
            fields. The context describes model and cluster. The rules of this module ignore it.
        words: Function of (execution, context) that returns (problem, hint).
    """

    name: str
    is_broken: Callable[[Any, Any], Any]
    words: Callable[[Execution, Any], tuple[str, str]]


EXECUTION_RULES = (
    Rule(
        "tp x pp x cp",
        lambda e, _: e.world_size % e.ranks_per_copy != 0,
        lambda e, _: (
            f"world size {e.world_size} (`nnodes` {e.nnodes} x `nproc_per_node` {e.nproc_per_node})"
            f" cannot be divided by tp {e.tp} x pp {e.pp} x cp {e.cp} = {e.ranks_per_copy}.",
            f"Use a world size that is a multiple of {e.ranks_per_copy}, or smaller tp, pp or cp.",
        ),
    ),
    Rule(
        "expert_tp",
        lambda e, _: (e.ep > 1) & (e.world_size % (e.pp * e.ep * e.experts_tp) != 0),
        lambda e, _: (
            f"the {e.world_size // e.pp} ranks of a pipeline stage cannot be divided by ep {e.ep}"
            f" x `expert_tp` {e.experts_tp}.",
            "Use a smaller ep, or `expert_tp` 1.",
        ),
    ),
    Rule(
        "virtual_stages",
        lambda e, _: (
            (e.virtual_stages > 1)
            & ((e.pp == 1) | (e.has("pipeline_schedule", "interleaved") == 0))
        ),
        lambda e, _: (
            f"`virtual_stages` is {e.virtual_stages}, with pp {e.pp} and the schedule"
            f" {e.pipeline_schedule}.",
            "Several stages per device need pp of at least 2 and the interleaved schedule.",
        ),
    ),
    Rule(
        "shard_size",
        lambda e, _: e.data_parallel_size % e.shard_ranks != 0,
        lambda e, _: (
            f"`shard_size` {e.shard_size} does not divide the data-parallel size"
            f" {e.data_parallel_size}.",
            "States are sharded over all data-parallel ranks, or over a divisor of them.",
        ),
    ),
)
"""Rules that do not depend on model and cluster. Only the first broken rule is reported."""


class ExecutionField(NamedTuple):
    """Description of a field of `Execution`, from which columns, options and forms are derived.

    `choices` lists the allowed values. In arrays, a choice is encoded as its index, and None of an
    optional count as 0.
    """

    name: str
    kind: Literal["count", "optional count", "number", "choice", "flag", "text"]
    default: Any
    help: str
    choices: tuple[Any, ...] = ()

    def encode(self, value: Any) -> int | float | bool:
        """Encode a value as a number for an array."""
        if self.kind == "choice":
            return self.choices.index(value)
        return 0 if value is None else value

    def decode(self, code: int | float | bool) -> Any:
        """Decode a number from an array."""
        if self.kind == "choice":
            return self.choices[int(code)]
        return None if self.kind == "optional count" and not code else code


def _field(info: msgspec.structs.FieldInfo) -> ExecutionField:
    hint, meta = get_args(info.type)
    if get_origin(hint) is Literal:
        return ExecutionField(info.name, "choice", info.default, meta.description, get_args(hint))
    kinds: dict[Any, Any] = {
        int: "count",
        bool: "flag",
        str: "text",
        float: "number",
        int | None: "optional count",
    }
    return ExecutionField(info.name, kinds[hint], info.default, meta.description)


EXECUTION_FIELDS: dict[str, ExecutionField] = {
    info.name: _field(info) for info in msgspec.structs.fields(Execution)
}
"""All fields of `Execution` by name, in order.

Arrays of executions (`trainpace.forecast.Grid`) and options of commands are derived from this
table.
"""
_COUNTS = tuple(field.name for field in EXECUTION_FIELDS.values() if field.kind == "count")


# ---- optimizers by name

Library = Literal["torch", "transformers", "bitsandbytes", "torchao"]


class OptimizerKind(NamedTuple):
    """Properties of an optimizer.

    Attributes:
        library: Library that implements it.
        states: State elements per parameter. 0 if factored states are negligible.
        bits: Bits per state element. None if states have the dtype of their parameter, as in
            torch.optim.
        is_paged: True if CUDA pages the states to the host when the device is full.
        on_host: True if an engine can run the update on the host's CPU (DeepSpeed's cpu_adam,
            cpu_lion and cpu_adagrad; plain SGD only moves bytes).
        whole_matrices: True if the update needs every gradient as a whole matrix.
    """

    library: Library
    states: int
    bits: int | None = None
    is_paged: bool = False
    on_host: bool = False
    whole_matrices: bool = False


def _bitsandbytes() -> dict[str, OptimizerKind]:
    states = {
        "adam": 2,
        "adamw": 2,
        "lion": 1,
        "ademamix": 3,
        "rmsprop": 1,
        "adagrad": 1,
        "sgd_momentum": 1,
    }
    kinds = {}
    for algorithm, n in states.items():
        for bits in (8, 32):
            name = f"{algorithm}_{bits}bit"
            kinds[name] = OptimizerKind("bitsandbytes", n, bits, on_host=name == "lion_32bit")
            if algorithm in ("adam", "adamw", "lion", "ademamix"):
                kinds[f"paged_{name}"] = OptimizerKind("bitsandbytes", n, bits, is_paged=True)
    return kinds


OPTIMIZERS: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind("torch", 0, on_host=True),
    "sgd_momentum": OptimizerKind("torch", 1, on_host=True),
    "adam": OptimizerKind("torch", 2, on_host=True),
    "adamw": OptimizerKind("torch", 2, on_host=True),
    "adagrad": OptimizerKind("torch", 1, on_host=True),
    "nadam": OptimizerKind("torch", 2),
    "radam": OptimizerKind("torch", 2),
    "adamax": OptimizerKind("torch", 2),
    "adadelta": OptimizerKind("torch", 2),
    "rmsprop": OptimizerKind("torch", 1),
    "asgd": OptimizerKind("torch", 1),
    "rprop": OptimizerKind("torch", 2),
    "adafactor": OptimizerKind("torch", 0, whole_matrices=True),
    "muon": OptimizerKind("torch", 1, whole_matrices=True),
    "adafactor_transformers": OptimizerKind("transformers", 0, whole_matrices=True),
    **_bitsandbytes(),
    "adamw_torch_8bit": OptimizerKind("torchao", 2, 8),
    "adamw_torch_4bit": OptimizerKind("torchao", 2, 4),
}
"""All known optimizers by name.

muon is torch.optim's Muon for hidden matrices, with AdamW for other parameters, as its
documentation requires. adafactor_transformers is the optimizer of transformers' Trainer for
`optim: adafactor`.
"""

_ALIASES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_xla": "adamw",
    "adamw_torch_npu_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "fused_adam": "adamw",
    "cpu_adam": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "paged_adam": "paged_adam_32bit",
    "lion": "lion_32bit",
    "paged_lion": "paged_lion_32bit",
    "ademamix": "ademamix_32bit",
    "paged_ademamix": "paged_ademamix_32bit",
    "rmsprop_bnb": "rmsprop_32bit",
    "rmsprop_bnb_8bit": "rmsprop_8bit",
    "rmsprop_bnb_32bit": "rmsprop_32bit",
    "fused_lion": "lion_32bit",
    "cpu_lion": "lion_32bit",
    "cpu_adagrad": "adagrad",
    "sgd_8bit": "sgd_momentum_8bit",
    "sgd_32bit": "sgd_momentum_32bit",
}
"""Names of the same optimizers in Hugging Face's `optim`, DeepSpeed and bitsandbytes."""
FOR_LANGUAGE, FOR_OTHERS = "adamw", "sgd_momentum"
"""Default optimizers for language models and for other models."""


def _folded(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


_KNOWN = {_folded(name): name for name in OPTIMIZERS} | {
    _folded(alias): name for alias, name in _ALIASES.items()
}


def optimizer_called(name: str) -> str:
    """Return Trainpace's name of an optimizer from any alias, such as adamw_torch or AdamW8bit.

    An unknown name is returned unchanged.
    """
    return _KNOWN.get(_folded(name), name)


def find_optimizer(name: str) -> tuple[str, OptimizerKind]:
    """Return (Trainpace's name, properties) of an optimizer.

    Raises:
        UnknownName: If the optimizer is unknown.
    """
    known = optimizer_called(name)
    if known not in OPTIMIZERS:
        raise UnknownName(
            "optimizer", name, [*OPTIMIZERS, *_ALIASES], f"Known: {', '.join(OPTIMIZERS)}."
        )
    return known, OPTIMIZERS[known]


def widens(name: str) -> bool:
    """Return True if the optimizer states have the dtype of their parameter.

    With an fp32 copy of 16-bit weights, such states are in fp32 too.
    """
    kind = OPTIMIZERS.get(name)
    return kind is None or kind.bits is None


def host_update_bytes(name: str) -> float | None:
    """Return the bytes of host memory that an update on the CPU moves per parameter.

    The update reads the gradient, the weight and the states in fp32. It writes the weight and the
    states, and a 16-bit copy of the weight (Ren et al. 2021: 30 for Adam).

    Returns:
        The bytes, or None if no engine runs this optimizer on the CPU.
    """
    kind = OPTIMIZERS.get(name)
    return (
        None
        if kind is None or not kind.on_host
        else 4.0 * (2 + kind.states) + 4.0 * (1 + kind.states) + 2.0
    )
