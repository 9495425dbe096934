"""From a measured run to what has to be forecast: the workload's variant, the execution, the cluster.

What a run does not state is filled in by what was usual for its software: torch before 2.0 (transformers: before 2.1.1) had no
fused attention, and optimizers that launched kernels tensor by tensor. "fp32" stays fp32 on Ampere and newer, since a run in TF32
says tf32.
"""

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import (
    PRECISIONS,
    Execution,
    ExpertExchange,
    PipelineSchedule,
    Precision,
)
from trainpace.core.hardware import Cluster, Device, find_device, find_host
from trainpace.core.software import TODAY, Software, parse_version
from trainpace.forecast.attention import Implementation, implementation_on
from trainpace.forecast.measured_runs import MeasuredRun
from trainpace.workload import Form, Mode, ModelSpec, Variant, form_of

TYPICAL_NETWORK_GB_PER_S = 25.0
"""A GPU's share of a node's network where the run does not state it: eight cards of 200 Gbit/s for eight GPUs, as large
A100 clusters have."""
HOPPER_NETWORK_GB_PER_S = 50.0
"""The same with 400 Gbit/s cards, as nodes of H100 and newer have."""

AS_OLD_AS_ITS_CARD = (1, 9)
"""The torch of a run on a card from before Ampere, where none is stated."""

Peak = Literal["allocated", "reserved", "device"]
"""Which memory a run's peak is: live tensors', the allocator's, or what the device's own monitor shows."""


class Case(NamedTuple):
    """One run, ready to be forecast.

    loads_all_kernels: CUDA, older than 11.7, loads them with its context. assumed: what the run does not state and its
    forecast needed.
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
        """Fused attention's kernels on the run's card."""
        return implementation_on(self.cluster.device, self.software.fused_attention)

    @property
    def trace_key(self) -> tuple[str, Form, Variant]:
        """Cases with the same key share one traced workload."""
        return self.spec, self.form, self.variant


def case_of(run: MeasuredRun, folder: Path) -> Case:
    """The case of a run; `TrainpaceError` says in one sentence why it cannot be forecast.

    `folder` is where ``transformers:FILE.json`` is looked for.
    """
    spec = _spec(run, folder)
    execution = execution_of(run)
    device = find_device(run.gpu_canonical or run.gpu)
    version = _torch_version(run)
    is_transformer = ModelSpec.of(spec).kind == "transformers"
    variant = Variant(
        optimizer=_optimizer(run) if execution.optimizer != "none" else "sgd",
        sequence_length=int(run.seq_len) if run.seq_len and is_transformer else None,
        image_size=int(run.img_size) if run.img_size and not is_transformer else None,
        mode=mode_of(run),
        legacy=version is not None and version < ((2, 1, 1) if is_transformer else (2, 0, 0)),
        checkpointing=execution.activation_checkpointing == "full"
        and execution.tp * execution.pp * execution.cp == 1,
    )
    assumed = [run.assumed] if run.assumed else []
    software, age = software_of(run, device)
    network = network_gb_per_s(run.interconnect, execution.nproc_per_node)
    if network is None and execution.nnodes > 1:
        major = device.compute_capability.partition(".")[0]
        newer = major.isdigit() and int(major) >= 9
        network = HOPPER_NETWORK_GB_PER_S if newer else TYPICAL_NETWORK_GB_PER_S
        assumed.append(f"a network of {network:g} GB/s a GPU")
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
        variant=variant,
        execution=execution,
        cluster=cluster,
        measured_ms=measured_ms(run, execution),
        software=software,
        peak=run.peak_memory_kind or "allocated",
        loads_all_kernels=version is not None
        and version < (1, 13),  # torch before was built for CUDA up to 11.6
        assumed=", ".join([*assumed, *([age] if age else [])]),
    )


MOST = {
    "num_gpus": 1e6,
    "num_nodes": 1e6,
    "batch_per_gpu": 1e9,
    "global_batch": 1e12,
    "grad_accum": 1e9,
    "seq_len": 1e9,
    "img_size": 1e5,
}
"""Sizes beyond which a table is damaged, and which would be counted up to."""


def execution_of(run: MeasuredRun) -> Execution:
    """How a run was executed. Raises `TrainpaceError` for sizes that do not go together, or that no run has."""
    for name, most in MOST.items():
        value = getattr(run, name)
        if value is not None and value > most:
            raise TrainpaceError(f"{name} is {value:g}; no run has more than {most:g}.")
    stated = read_parallelism(run.parallelism)
    nodes, gpus, shards = (
        max(1, int(run.num_nodes or 1)),
        max(1, int(run.num_gpus or 1)),
        stated.tp * stated.pp * stated.cp,
    )
    if gpus % nodes:
        raise TrainpaceError(f"{gpus} GPUs cannot be divided over {nodes} nodes.")
    if gpus % shards:
        raise TrainpaceError(f"{gpus} GPUs cannot be divided by tp x pp x cp = {shards}.")
    batch, accumulation = _batches(run, stated.pp, gpus // shards)
    if "act_cpu_offload=True" in run.parallelism:
        raise TrainpaceError("activations offloaded to the host are not forecast.")
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


def read_parallelism(text: str) -> Execution:
    """One data-parallel rank, as a text such as ``fsdp=8,tp=8,pp=8(Interleaved 1F1B),async_tp,ac=full`` states it.

    The words are the field's: `zero=1` is a ZeRO stage, `interleave=3` and `vp=3` are three virtual stages a device,
    `gpipe`, `dualpipe` and `interleaved` pipeline schedules, `sp` sequence parallelism, `ac=full|selective|none` activation
    checkpointing. `fsdp=32` counts the ranks that shard, `fsdp=FULL_SHARD` names torch's strategy. `DataParallel` is
    torch's module of that name. `ep=8` divides experts over ranks, of which each holds whole ones unless `etp` says
    otherwise, as in NVIDIA's recipes; `deepep` sends tokens by DeepEP, `ep_overlap` under other computation, then with
    `fp8_dispatch` in FP8; `expert_nodes=4` are the nodes that a token goes to at most. Raises
    `TrainpaceError` for sizes of 0 and a ZeRO stage above 3.
    """
    tp, pp, cp, ep, expert_tp = (_size(text, name, 1) for name in ("tp", "pp", "cp", "ep", "etp"))
    zero = _size(text, "zero", 0)
    if 0 in (tp, pp, cp, ep, expert_tp) or zero > 3:
        raise TrainpaceError(f"parallelism {text!r} is not understood.")
    sharding = re.search(r"\bfsdp(?:=(\w+))?", text)
    strategy = (sharding[1] or "").upper() if sharding else ""
    # one data-parallel rank shards nothing; but FSDP shards over context-parallel ranks too, as torchtitan does
    shards = sharding and strategy not in ("NO_SHARD", "0") and not (strategy == "1" and cp == 1)
    virtual_stages, schedule = _pipeline(text, pp)
    checkpointing = re.search(r"\bac=(full|selective)", text)
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
        zero_stage=3 if shards else zero,  # type: ignore[arg-type]
        # torchtitan keeps parameters gathered under a pipeline, whose micro-batches would gather them again and again
        reshard_after_forward="SHARD_GRAD_OP" not in strategy
        and "ZERO2" not in strategy
        and pp == 1,
        activation_checkpointing=checkpointing[1] if checkpointing else "none",  # type: ignore[arg-type]
        sequence_parallel=tp > 1 and bool(re.search(r"\bsp\b(?!=[01])|\bsp=1", text)),
        async_tensor_parallel=tp > 1 and "async_tp" in text,
    )


def _pipeline(text: str, pp: int) -> tuple[int, PipelineSchedule]:
    """(virtual stages a device, schedule). An interleaved schedule whose stages are not stated has two a device, as in torch."""
    if pp == 1:
        return 1, "1f1b"
    for schedule in ("gpipe", "dualpipe"):
        if re.search(rf"\b{schedule}\b", text, re.IGNORECASE):
            return 1, schedule
    stages = _size(text, "vp", 0) or _size(text, "interleave", 0) or 1
    if stages == 1 and "interleaved" in text.lower():
        stages = 2
    return (stages, "interleaved") if stages > 1 else (1, "1f1b")


def _expert_exchange(text: str) -> ExpertExchange:
    if "ep_overlap" in text:
        return "overlapped_fp8" if "fp8_dispatch" in text else "overlapped"
    return "deep_ep" if "deepep" in text.lower() else "all_to_all"


def _size(text: str, name: str, default: int) -> int:
    match = re.search(rf"(?<![a-z_]){name}=(\d+)", text)
    return int(match[1]) if match else default


def _batches(run: MeasuredRun, pp: int, ranks: int) -> tuple[int, int]:
    """(micro-batch, accumulation)."""
    whole, batch, accumulation = run.global_batch, run.batch_per_gpu, run.grad_accum
    if accumulation is None and whole and batch:
        accumulation = whole / (batch * ranks)
        if accumulation != int(accumulation):
            raise TrainpaceError(
                f"a global batch of {whole:g} is not a multiple of {batch:g} samples on each of"
                f" {ranks} ranks."
            )
    if accumulation is None and pp > 1:
        raise TrainpaceError(
            "the run states neither a global batch nor accumulation, which a pipeline needs."
        )
    accumulation = max(1, int(accumulation or 1))
    batch = batch or (whole or 0) / ranks / accumulation
    if batch < 1:
        raise TrainpaceError("the run states no batch size of at least 1 a GPU.")
    if batch != int(batch):
        raise TrainpaceError(f"a global batch of {whole:g} makes {batch:g} samples a rank.")
    return int(batch), accumulation


def _spec(run: MeasuredRun, folder: Path) -> str:
    spec = run.model_spec or run.model
    if not run.model_spec and ModelSpec.of(spec).kind in ("built_in", "script"):
        raise TrainpaceError(
            f"no model definition is known for {run.model or 'a run without a name'!r}."
        )
    if run.framework.startswith("tensorflow") and re.fullmatch(r"torchvision:vgg\d+", spec):
        return (  # which has no pooling before its classifier
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
        raise TrainpaceError("the run states no precision.")
    if run.precision == "fp8_rowwise":
        raise TrainpaceError(
            "FP8 with a scale for every row is not forecast: its quantising kernels are not in the"
            " trace."
        )
    return as_precision(run.precision)


def as_precision(word: str) -> Precision:
    """A precision by name. Raises TrainpaceError for an unknown one."""
    if word not in PRECISIONS:
        raise TrainpaceError(f"precision {word!r} is not one of {', '.join(PRECISIONS)}.")
    return word


def mode_of(run: MeasuredRun) -> Mode:
    """Training, unless the run says otherwise."""
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
    """The software of a run, and what was assumed of it.

    A run that states no version is taken to have FlashAttention 2, and on a card from before Ampere to launch as slowly as torch
    did when its card was new.
    """
    native = implementation_on(device) if run.attention == "native" else None
    stated: dict[str, Any] = {
        "attention": native or run.attention or None,
        "optimizer": run.optimizer_implementation or None,
        "cross_entropy": run.cross_entropy or None,
        "fp8_recipe": run.fp8_recipe or None,
        "router": "16_bit" if run.engine == "megatron_core" else None,
    }
    if run.framework.startswith("tensorflow"):
        return (
            Software(
                framework="tensorflow", version=parse_version(run.framework_version), **stated
            ),
            "",
        )
    version = _torch_version(run)
    if version is not None:
        return Software(version=version, **stated), ""
    stated["attention"] = stated["attention"] or "flash2"
    if not re.match(r"[1-7]\.", device.compute_capability):
        return Software(**stated), ""
    stated["optimizer"] = stated["optimizer"] or "foreach"  # as in the trace
    return Software(version=AS_OLD_AS_ITS_CARD, **stated), "a host that launches as torch 1.9 did"


def network_gb_per_s(text: str, gpus_per_node: int) -> float | None:
    """GB/s a GPU from texts such as "1600 Gbps RoCE" (a node's), "4x Omni-Path 100 Gb/s per node" or "RDMA 400 Gb/s per
    GPU"; None where none is stated."""
    match = re.search(
        r"(?:(\d+)x\s*(?:[A-Za-z-]+\s+)?)?(\d+(?:\.\d+)?)\s*(?:Gbps|Gb/s|Gbit/s)", text
    )
    if match is None:
        return None
    stated = float(match[2]) * float(match[1] or 1) / 8
    return stated if "per GPU" in text else stated / gpus_per_node


def measured_ms(run: MeasuredRun, execution: Execution) -> float | None:
    """The step that a run states, or what its throughput makes it; None where it states neither.

    Tokens go before samples, which sources round to whole numbers.
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
        raise TrainpaceError(f"a step of {ms:g} ms is nobody's measurement.")
    return ms
