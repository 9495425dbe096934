"""Readers of measured runs from CSV or Parquet, and their conversion to cases for a forecast.

A row is one training step that somebody timed. A forecast of it needs the model, the GPU, the
precision and the batch size. docs/verbs/validate.md describes all columns. An empty field means
that the value is unknown. Unknown columns are ignored.

Missing values get the usual value for the software of the run. For example, torch before 2.0
(before 2.1.1 for models of transformers) had no fused attention, and its optimizers launched
kernels for one tensor at a time. "fp32" means fp32 also on Ampere and newer. Runs in TF32 must say
tf32.
"""

import csv
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.execution import (
    PRECISIONS,
    Engine,
    Execution,
    ExpertExchange,
    PipelineSchedule,
    Precision,
)
from trainpace.core.hardware import Cluster, Device, find_device, find_host
from trainpace.core.intake import first_bytes, opened_text
from trainpace.core.records import Record
from trainpace.core.software import (
    TODAY,
    Attention,
    CrossEntropy,
    Fp8Recipe,
    OptimizerImplementation,
    Software,
    parse_version,
)
from trainpace.forecast.attention import Implementation, implementation_on
from trainpace.workload import Form, Mode, ModelSpec, Variant, form_of


class MeasuredRun(Record):
    """One measured run as its source describes it.

    A missing number is None, and a missing text is "".

    Attributes:
        engine: Engine of `Execution`.
        attention: Attention of `Software`, or "native" for today's default on the card. The fields
            optimizer_implementation, cross_entropy and fp8_recipe are also those of `Software`.
        peak_memory_kind: Kind of `peak_mem_gib`. See `Peak`.
        host_copy: "yes" if each step copies its samples from pageable memory.
        cudnn_benchmark: "yes" if torch.backends.cudnn.benchmark was on. cuDNN then tries
            several algorithms for each convolution.
        host: CPU that launched the kernels.
        assumed: Assumptions that the author of the table made.
    """

    index: int
    file: str = ""
    model_spec: str = ""
    model: str = ""
    model_variant_or_config: str = ""
    framework: str = ""
    framework_version: str = ""
    gpu_canonical: str = ""
    gpu: str = ""
    interconnect: str = ""
    precision: str = ""
    memory_format: str = ""
    compile: str = ""
    optimizer: str = ""
    parallelism: str = ""
    mode: str = ""
    engine: Literal["", Engine] = ""
    attention: Literal["", Attention, "native"] = ""
    optimizer_implementation: Literal["", OptimizerImplementation] = ""
    cross_entropy: Literal["", CrossEntropy] = ""
    fp8_recipe: Literal["", Fp8Recipe] = ""
    peak_memory_kind: Literal["", "allocated", "reserved", "device"] = ""
    host_copy: Literal["", "yes", "no"] = ""
    cudnn_benchmark: Literal["", "yes", "no"] = ""
    host: str = ""
    assumed: str = ""
    notes: str = ""
    num_gpus: float | None = None
    num_nodes: float | None = None
    batch_per_gpu: float | None = None
    global_batch: float | None = None
    grad_accum: float | None = None
    seq_len: float | None = None
    img_size: float | None = None
    step_time_ms: float | None = None
    samples_per_sec: float | None = None
    tokens_per_sec: float | None = None
    tflops_per_gpu: float | None = None
    peak_mem_gib: float | None = None


_CHOICES = {
    name: get_args(kind)
    for name, kind in get_type_hints(MeasuredRun).items()
    if get_origin(kind) is Literal
}
_DEFAULTS = dict(
    zip(MeasuredRun.__struct_fields__[1:], MeasuredRun.__struct_defaults__, strict=True)
)


def read_runs(path: Path) -> list[MeasuredRun]:
    """Read all runs of a CSV or Parquet file.

    Raises:
        UnreadableInput: If the file has no model column, or if a number or word is invalid.
    """
    columns, rows = read_table(path)
    if not {"model_spec", "model"} & set(columns):
        raise UnreadableInput(
            f"{path} needs a column model_spec or model.",
            "trainpace validate --help lists the columns.",
        )
    return [run_of(path, index, row) for index, row in enumerate(rows)]


def run_of(path: Path, index: int, row: dict[str, Any]) -> MeasuredRun:
    """Convert one row of a table to a run.

    Args:
        path: Path of the table, for messages.
        index: Number of the row.
        row: Values by column name.

    Raises:
        UnreadableInput: If a number or word is invalid.
    """
    values: dict[str, Any] = {"index": index}
    row = {
        "file": path.stem,
        **{name: value for name, value in row.items() if name != "file" or value},
    }
    for name, default in _DEFAULTS.items():
        read = number if default is None else _text
        try:
            values[name] = read(row.get(name))
        except TrainpaceError as error:
            raise UnreadableInput(f"{path} row {index}, column {name}: {error.message}") from None
    for name, choices in _CHOICES.items():
        if values[name] not in choices:
            raise UnreadableInput(
                f"{path} row {index}: {name} is {values[name]!r}; it must be one of"
                f" {', '.join(choices[1:])}, or empty."
            )
    return MeasuredRun(**values)


def _text(value: Any) -> str:
    # `value != value` is True only for NaN, which stands for an empty field.
    return "" if value is None or value != value else str(value).strip()


def number(value: Any) -> float | None:
    """Parse a finite number of at least 0. An empty field gives None.

    Raises:
        TrainpaceError: If the value is not such a number.
    """
    if value is None or str(value).strip().lower() in ("", "nan", "none"):
        return None
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = -1.0
    if not 0 <= result < float("inf"):
        raise TrainpaceError(f"{str(value)[:40]!r} is not a finite number of 0 or more.")
    return result


def read_table(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """Return the columns of a CSV or Parquet file, and an iterator over its rows."""
    lines = _parquet(path) if first_bytes(path)[:4] == b"PAR1" else _csv(path)
    columns = list(next(lines, ()))
    return columns, (dict(zip(columns, line, strict=False)) for line in lines if line)


def _csv(path: Path) -> Iterator[Sequence[Any]]:
    """Yield the names of the columns, then the rows."""
    # The record of a run with many steps exceeds the csv module's default field size.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with opened_text(path, newline="") as file:
            yield from csv.reader(file)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableInput(f"{path} is neither Parquet nor CSV text ({error}).") from None


def _parquet(path: Path) -> Iterator[Sequence[Any]]:
    """Yield the names of the columns, then the rows."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TrainpaceError(
            "reading Parquet needs pyarrow.", "pip install 'trainpace[data]', or give CSV."
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        yield file.schema_arrow.names
        for batch in file.iter_batches(10_000):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
    except (pyarrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UnreadableInput(f"{path} is not a readable Parquet file ({reason}).") from None


# ---- cases

TYPICAL_NETWORK_GB_PER_S = 25.0
"""Assumed network bandwidth per GPU on nodes before Hopper.

Large A100 clusters have eight network cards of 200 Gbit/s for eight GPUs.
"""
HOPPER_NETWORK_GB_PER_S = 50.0
"""Assumed network bandwidth per GPU on nodes of H100 and newer, with cards of 400 Gbit/s."""

AS_OLD_AS_ITS_CARD = (1, 9)
"""Assumed torch version of a run on a card from before Ampere, if the run gives no version."""

Peak = Literal["allocated", "reserved", "device"]
"""Way in which peak memory was measured.

allocated: live tensors. reserved: memory of torch's allocator. device: a monitor such as
nvidia-smi.
"""


class Case(NamedTuple):
    """One run with everything that its forecast needs.

    Attributes:
        run: The run as measured.
        spec: Specification of the model.
        form: Traced form for the precision of the run.
        variant: Options of the trace, such as optimizer and sequence length.
        execution: Parallelism, batch and other settings of the run.
        cluster: Devices and network of the run.
        measured_ms: Measured step time, or None.
        software: Software of the run.
        peak: Way in which the peak memory was measured.
        loads_all_kernels: True if CUDA loads all kernels with its context (CUDA before 11.7).
        assumed: Assumptions of the forecast, in words.
    """

    run: MeasuredRun
    spec: str
    form: Form
    variant: Variant
    execution: Execution
    cluster: Cluster
    measured_ms: float | None
    software: Software = TODAY
    peak: Peak = "allocated"
    loads_all_kernels: bool = False
    assumed: str = ""

    @property
    def implementation(self) -> Implementation:
        """Implementation of fused attention that the run uses on its card."""
        return implementation_on(self.cluster.device, self.software.fused_attention)

    @property
    def trace_key(self) -> tuple[str, Form, Variant]:
        """Key of the traced workload. Cases with equal keys share one trace."""
        return self.spec, self.form, self.variant


def case_of(run: MeasuredRun, folder: Path) -> Case:
    """Return the case of a run.

    Args:
        run: The measured run.
        folder: Folder with model files, for example for ``transformers:FILE.json``.

    Raises:
        TrainpaceError: If the run cannot be forecast. The message gives the reason.
    """
    spec = _spec(run, folder)
    execution = execution_of(run)
    device = find_device(run.gpu_canonical or run.gpu)
    version = _torch_version(run)
    software, age = software_of(run, device)
    network, typical = _network(run, execution, device)
    cluster = Cluster(
        device=device,
        devices_per_node=execution.nproc_per_node,
        nodes=execution.nnodes,
        network_gb_per_s_per_device=network,
        host=find_host(run.host) if run.host else None,
    )
    return Case(
        run=run,
        spec=spec,
        form=form_of(execution.precision),
        variant=_variant(run, spec, execution, version),
        execution=execution,
        cluster=cluster,
        measured_ms=measured_ms(run, execution),
        software=software,
        peak=run.peak_memory_kind or "allocated",
        # torch before 1.13 was built for CUDA 11.6 or older.
        loads_all_kernels=version is not None and version < (1, 13),
        assumed=", ".join(filter(None, (run.assumed, typical, age))),
    )


def _variant(
    run: MeasuredRun, spec: str, execution: Execution, version: tuple[int, ...] | None
) -> Variant:
    is_transformer = ModelSpec.of(spec).kind == "transformers"
    undivided = execution.ranks_per_copy == 1
    return Variant(
        optimizer=_optimizer(run) if execution.optimizer != "none" else "sgd",
        sequence_length=int(run.seq_len) if run.seq_len and is_transformer else None,
        image_size=int(run.img_size) if run.img_size and not is_transformer else None,
        mode=mode_of(run),
        legacy=version is not None and version < ((2, 1, 1) if is_transformer else (2, 0, 0)),
        checkpointing=execution.activation_checkpointing == "full" and undivided,
    )


def _network(run: MeasuredRun, execution: Execution, device: Device) -> tuple[float | None, str]:
    """Return the network bandwidth in GB/s per GPU, and its assumption in words.

    The assumption is "" if the run gives the bandwidth or has one node.
    """
    network = network_gb_per_s(run.interconnect, execution.nproc_per_node)
    if network is not None or execution.nnodes == 1:
        return network, ""
    major = device.generation
    newer = major.isdigit() and int(major) >= 9
    network = HOPPER_NETWORK_GB_PER_S if newer else TYPICAL_NETWORK_GB_PER_S
    return network, f"a network of {network:g} GB/s per GPU"


MOST = {
    "num_gpus": 1e6,
    "num_nodes": 1e6,
    "batch_per_gpu": 1e9,
    "global_batch": 1e12,
    "grad_accum": 1e9,
    "seq_len": 1e9,
    "img_size": 1e5,
}
"""Largest plausible sizes.

Without these limits, a damaged table could keep a forecast busy for hours.
"""


def execution_of(run: MeasuredRun) -> Execution:
    """Return the execution of a run.

    Raises:
        TrainpaceError: If the sizes of the run are impossible.
    """
    _check_sizes(run)
    if "act_cpu_offload=True" in run.parallelism:
        raise TrainpaceError("offloaded activations cannot be forecast.")
    stated = read_parallelism(run.parallelism)
    nodes, gpus = (max(1, int(count or 1)) for count in (run.num_nodes, run.num_gpus))
    shards = stated.ranks_per_copy
    for parts, name in ((nodes, "the number of nodes"), (shards, "tp x pp x cp")):
        if gpus % parts:
            raise TrainpaceError(f"{gpus} GPUs cannot be divided by {name}, {parts}.")
    batch, accumulation = _batches(run, stated.pp, gpus // shards)
    in_node = nodes > 1 and re.search(r"\bfsdp=\w*HYBRID", run.parallelism, re.IGNORECASE)
    return replace(
        stated,
        micro_batch=batch,
        accumulation=accumulation,
        nnodes=nodes,
        nproc_per_node=gpus // nodes,
        engine=run.engine or stated.engine,
        precision=_precision(run),
        optimizer=_optimizer(run) if mode_of(run) == "train" else "none",
        shard_size=gpus // nodes if in_node else None,
        compile=run.compile in ("compile", "xla"),
        channels_last=run.memory_format == "nhwc" or run.framework.startswith("tensorflow"),
    )


def _check_sizes(run: MeasuredRun) -> None:
    for name, most in MOST.items():
        value = getattr(run, name)
        if value is not None and value > most:
            raise TrainpaceError(f"{name} is {value:g}; it must be at most {most:g}.")


def read_parallelism(text: str) -> Execution:
    """Parse a text such as ``fsdp=8,tp=8,pp=8(Interleaved 1F1B),async_tp,ac=full``.

    The text may contain:

    - `tp=`, `pp=`, `cp=`: sizes of tensor, pipeline and context parallelism.
    - `zero=1`: ZeRO stage. `fsdp=32`: FSDP over 32 ranks. `fsdp=FULL_SHARD`: FSDP with a strategy
      of torch. `DataParallel`: torch's nn.DataParallel.
    - `interleave=3` or `vp=3`: three virtual stages per device. `gpipe`, `interleaved`: pipeline
      schedule.
    - `sp`: sequence parallelism. `async_tp`: asynchronous tensor parallelism.
      `ac=full|selective|none`: activation checkpointing.
    - `ep=8`: expert parallelism over 8 ranks. Experts are not split unless `etp` is given, as in
      NVIDIA's recipes. `deepep`: DeepEP sends the tokens. `ep_overlap`: other computation hides
      the sending. `expert_nodes=4`: experts of a token are on at most 4 nodes.

    Returns:
        The execution on tp x pp x cp x ep x etp devices.

    Raises:
        TrainpaceError: If a size is 0 or the ZeRO stage is above 3.
    """
    tp, pp, cp, ep, expert_tp = (_size(text, name, 1) for name in ("tp", "pp", "cp", "ep", "etp"))
    zero = _size(text, "zero", 0)
    if 0 in (tp, pp, cp, ep, expert_tp) or zero > 3:
        raise TrainpaceError(f"invalid parallelism {text!r}: sizes are 1 or more, ZeRO 0 to 3.")
    virtual_stages, schedule = _pipeline(text, pp)
    checkpointing = re.search(r"\bac=(full|selective)", text)
    sequence = bool(re.search(r"\bsp\b(?!=[01])|\bsp=1", text))
    return Execution(
        nproc_per_node=tp * pp * cp * ep * expert_tp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        expert_tp=expert_tp if ep > 1 else None,
        expert_exchange=_expert_exchange(text),
        expert_nodes=_size(text, "expert_nodes", 0) or None,
        engine="data_parallel" if "DataParallel" in text and "Distributed" not in text else "ddp",
        virtual_stages=virtual_stages,
        pipeline_schedule=schedule,
        activation_checkpointing=checkpointing[1] if checkpointing else "none",  # type: ignore
        sequence_parallel=tp > 1 and sequence,
        async_tensor_parallel=tp > 1 and "async_tp" in text,
        **_sharding(text, zero, pp, cp),
    )


def _sharding(text: str, zero: int, pp: int, cp: int) -> dict[str, Any]:
    """Return the fields `zero_stage` and `reshard_after_forward` of the execution."""
    found = re.search(r"\bfsdp(?:=(\w+))?", text)
    strategy = (found[1] or "").upper() if found else ""
    # FSDP over one rank shards nothing. But torchtitan also shards over context-parallel ranks.
    alone = strategy in ("NO_SHARD", "0") or (strategy == "1" and cp == 1)
    stays = "SHARD_GRAD_OP" in strategy or "ZERO2" in strategy
    return {
        "zero_stage": 3 if found and not alone else zero,
        # In a pipeline, torchtitan keeps parameters gathered. Otherwise each micro-batch would
        # gather them again.
        "reshard_after_forward": not stays and pp == 1,
    }


def _pipeline(text: str, pp: int) -> tuple[int, PipelineSchedule]:
    """Return the virtual stages per device, and the schedule.

    Interleaved schedules have two virtual stages by default, as in torch.
    """
    if pp == 1:
        return 1, "1f1b"
    if re.search(r"\bgpipe\b", text, re.IGNORECASE):
        return 1, "gpipe"
    stages = _size(text, "vp", 0) or _size(text, "interleave", 0) or 1
    if stages == 1 and "interleaved" in text.lower():
        stages = 2
    return (stages, "interleaved") if stages > 1 else (1, "1f1b")


def _expert_exchange(text: str) -> ExpertExchange:
    if "ep_overlap" in text:
        return "overlapped"
    return "deep_ep" if "deepep" in text.lower() else "all_to_all"


def _size(text: str, name: str, default: int) -> int:
    match = re.search(rf"(?<![a-z_]){name}=(\d+)", text)
    return int(match[1]) if match else default


def _batches(run: MeasuredRun, pp: int, ranks: int) -> tuple[int, int]:
    """Return the micro-batch and the accumulation steps.

    Args:
        run: The measured run.
        pp: Number of pipeline stages.
        ranks: Number of data-parallel ranks.
    """
    whole, batch = run.global_batch, run.batch_per_gpu
    given = run.grad_accum
    if given is None and whole and batch:
        given = whole / (batch * ranks)
        if given != int(given):
            raise TrainpaceError(
                f"a global batch of {whole:g} is not a multiple of {batch:g} samples on each of"
                f" {ranks} ranks."
            )
    if given is None and pp > 1:
        raise TrainpaceError(
            "a pipeline needs a global batch or accumulation, and the run gives neither."
        )
    return _micro_batch(whole, batch, ranks, max(1, int(given or 1)))


def _micro_batch(
    whole: float | None, batch: float | None, ranks: int, accumulation: int
) -> tuple[int, int]:
    batch = batch or (whole or 0) / ranks / accumulation
    if batch < 1:
        raise TrainpaceError("the run gives no batch size of at least 1 per GPU.")
    if batch != int(batch):
        raise TrainpaceError(f"the run has {batch:g} samples per rank, not a whole number.")
    return int(batch), accumulation


def _spec(run: MeasuredRun, folder: Path) -> str:
    spec = run.model_spec or run.model
    if not run.model_spec and ModelSpec.of(spec).kind in ("built_in", "script"):
        raise TrainpaceError(
            f"no model definition is known for {run.model or 'a run without a name'!r}."
        )
    if run.framework.startswith("tensorflow") and re.fullmatch(r"torchvision:vgg\d+", spec):
        return (  # The VGG of Keras has no pooling before its classifier.
            f"{spec.removeprefix('torchvision:')}_keras"
        )
    named = ModelSpec.of(spec)
    if named.kind == "transformers":
        for file in (folder / named.path, folder / "models" / named.path, Path(named.path)):
            if file.is_file():
                return named.with_path(file)
        raise TrainpaceError(f"{spec}: there is no such file in {folder}.")
    file = folder / named.path
    return named.with_path(file) if file.is_file() else spec


def _precision(run: MeasuredRun) -> Precision:
    if not run.precision:
        raise TrainpaceError("the run gives no precision.")
    if run.precision == "fp8_rowwise":
        raise TrainpaceError(
            "FP8 with a scale per row cannot be forecast: its quantizing kernels are not in the"
            " trace."
        )
    return as_precision(run.precision)


def as_precision(word: str) -> Precision:
    if word not in PRECISIONS:
        raise TrainpaceError(f"precision {word!r} is not one of {', '.join(PRECISIONS)}.")
    return word


def mode_of(run: MeasuredRun) -> Mode:
    if run.mode in get_args(Mode):
        return run.mode  # type: ignore[return-value]
    if not run.mode:
        return "train"
    raise TrainpaceError(f"mode {run.mode!r} is not one of train, forward_backward, inference.")


def _optimizer(run: MeasuredRun) -> str:
    name = run.optimizer.lower()
    if "sgd" in name:
        return "sgd_momentum" if "momentum" in name else "sgd"
    for word, optimizer in (("adamw", "adamw"), ("lamb", "adamw"), ("adam", "adam")):
        if word in name:
            return optimizer
    return "adamw" if run.seq_len else "sgd_momentum"


def _torch_version(run: MeasuredRun) -> tuple[int, ...] | None:
    version = re.match(
        r"(?:torch |pytorch )?v?(\d+)\.(\d+)(?:\.(\d+))?", run.framework_version.strip()
    )
    return None if version is None else tuple(int(part or 0) for part in version.groups())


def software_of(run: MeasuredRun, device: Device) -> tuple[Software, str]:
    """Return the software of a run, and its assumption in words.

    If the run gives no version, FlashAttention 2 is assumed. On a card from before Ampere, the
    launch cost of torch 1.9 is assumed as well.
    """
    native = implementation_on(device) if run.attention == "native" else None
    named = {
        "attention": native or run.attention,
        "optimizer": run.optimizer_implementation,
        "cross_entropy": run.cross_entropy,
        "fp8_recipe": run.fp8_recipe,
        "router": "16_bit" if run.engine == "megatron_core" else "",
    }
    given: dict[str, Any] = {name: value for name, value in named.items() if value}
    if run.framework.startswith("tensorflow"):
        version = parse_version(run.framework_version)
        return Software(framework="tensorflow", version=version, **given), ""
    torch = _torch_version(run)
    if torch is not None:
        return Software(version=torch, **given), ""
    given.setdefault("attention", "flash2")
    if not re.match(r"[1-7]\.", device.compute_capability):
        return Software(**given), ""
    given.setdefault("optimizer", "foreach")  # The trace has this implementation.
    return Software(version=AS_OLD_AS_ITS_CARD, **given), "a host that launches as torch 1.9 did"


def network_gb_per_s(text: str, gpus_per_node: int) -> float | None:
    """Parse the network bandwidth in GB/s per GPU from a text, or return None.

    Examples are "1600 Gbps RoCE", "4x Omni-Path 100 Gb/s per node" and "RDMA 400 Gb/s per GPU".
    Rates without "per GPU" are those of a node.
    """
    match = re.search(
        r"(?:(\d+)x\s*(?:[A-Za-z-]+\s+)?)?(\d+(?:\.\d+)?)\s*(?:Gbps|Gb/s|Gbit/s)", text
    )
    if match is None:
        return None
    stated = float(match[2]) * float(match[1] or 1) / 8
    return stated if "per GPU" in text else stated / gpus_per_node


def measured_ms(run: MeasuredRun, execution: Execution) -> float | None:
    """Return the measured step time, or derive it from throughput. None if the run has neither.

    Tokens per second are preferred to samples per second, which sources often round to whole
    numbers.

    Raises:
        TrainpaceError: If the time is implausible.
    """
    samples = run.global_batch or execution.global_batch
    if run.step_time_ms:
        ms = run.step_time_ms
    elif run.tokens_per_sec and run.seq_len:
        ms = 1e3 * samples * int(run.seq_len) / run.tokens_per_sec
    elif run.samples_per_sec:
        ms = 1e3 * samples / run.samples_per_sec
    else:
        return None
    if not 1e-6 <= ms <= 1e12:
        raise TrainpaceError(f"a step of {ms:g} ms is implausible.")
    return ms
