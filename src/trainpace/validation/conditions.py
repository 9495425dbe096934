"""From a measured run to what has to be forecast: the workload's variant, the execution, the cluster.

What a run does not state is filled in the way of its time: torch before 2.0 (transformers: before 2.1.1) had no fused
attention, and optimizers that launched kernels tensor by tensor; "FP32" on Ampere or newer stays fp32 here, since the
columns tell TF32 apart.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

from trainpace.errors import TrainpaceError
from trainpace.execution import PRECISIONS, Engine, Execution, Precision
from trainpace.hardware import Cluster, Device, find_device
from trainpace.validation.gpt_sizes import GptSize, Named, named_model, write_configuration
from trainpace.validation.parallelism import Parallelism, read_parallelism, stages_of
from trainpace.validation.runs import Run
from trainpace.workload import Form, Mode, Variant, form_of

TYPICAL_NETWORK_GB_PER_S = 25.0
"""A GPU's share of a node's network where the run does not state it: eight cards of 200 Gbit/s for eight GPUs, as large
A100 clusters have."""
MEGATRON_LENGTH = 2048
TORCHTITAN_LENGTH = 8192
HOPPER_NETWORK_GB_PER_S = 50.0
"""The same with 400 Gbit/s cards, as nodes of H100 and newer have."""

Host = Literal["", "old_torch", "tensorflow"]
"""Software that launches slower than today's torch."""

Peak = Literal["allocated", "reserved", "device"]
"""Which memory a run's peak is: live tensors', the allocator's, or what the device's own monitor shows."""


AttentionKernels = Literal["", "first", "native"]
"""Fused attention's kernels. "": FlashAttention 2, as torch has it since 2.2. first: its first version, before that. native:
written for the card's own generation, as NVIDIA's containers bring with cuDNN."""


class Case(NamedTuple):
    """One run, ready to be forecast."""

    run: Run
    spec: str
    form: Form
    variant: Variant
    execution: Execution
    cluster: Cluster
    measured_ms: float | None
    host: Host = ""
    copies_to_device: bool = False
    peak: Peak = "allocated"
    attention: AttentionKernels = ""
    loads_all_kernels: bool = False
    """Does CUDA, older than 11.7, load them with its context?"""
    tries_convolutions: bool = False
    """Does cuDNN choose convolutions by trying them (torch.backends.cudnn.benchmark)?"""

    assumed: str = ""
    """What the run does not state and its forecast needed."""

    @property
    def trace_key(self) -> tuple[str, Form, Variant]:
        """Cases with the same key share one traced workload."""
        return self.spec, self.form, self.variant


def case_of(run: Run, folder: Path, made: Path | None = None) -> Case:
    """The case of a run; `TrainpaceError` says in one sentence why it cannot be forecast.

    `folder` is where ``transformers:FILE.json`` is looked for; into `made` the configurations of models that are known by
    their sizes alone are written, which without it cannot be forecast.
    """
    stated = read_parallelism(run.parallelism)
    known = None
    if not run.model_spec:
        known = named_model(run.model, run.model_variant_or_config, int(run.seq_len or MEGATRON_LENGTH), stated.pp)
    if known and known.size and _counts_recomputation(run, known.size):
        stated = stated._replace(checkpointing="full")
    spec = write_configuration(known, made) if known and made else _spec(run, folder)
    precision = precision_of(run, spec)
    device = find_device(run.gpu_canonical or run.gpu)
    length = _length(run, spec)
    execution, assumed = _execution(run, precision, spec, stated, known)
    if length and not run.seq_len:
        assumed.append(f"{length} tokens a sample")
    mode = mode_of(run)
    form: Form = form_of(precision)
    is_transformer = spec.startswith("transformers:")
    variant = Variant(
        optimizer=_optimizer(run) if mode == "train" else "sgd",
        sequence_length=length if is_transformer else None,
        image_size=int(run.img_size) if run.img_size and not is_transformer else None,
        mode=mode,
        legacy=_is_legacy(run, spec),
        checkpointing=execution.activation_checkpointing == "full" and not _cuts_blocks(execution),
    )
    network = network_gb_per_s(run.interconnect, execution.nproc_per_node)
    if network is None and execution.nnodes > 1:
        newer = float(device.compute_capability or 0) >= 9
        network = HOPPER_NETWORK_GB_PER_S if newer else TYPICAL_NETWORK_GB_PER_S
        assumed.append(f"a network of {network:g} GB/s a GPU")
    cluster = Cluster(
        device=device,
        devices_per_node=execution.nproc_per_node,
        nodes=execution.nnodes,
        network_gb_per_s_per_device=network,
    )
    copies = bool(re.search(r"\bH2D copy\b|\bhost feed\b", run.notes))
    if known and known.assumed:
        assumed.append(known.assumed)
    measured = measured_ms(run, execution, length, known.size if known else None)
    return Case(
        run, spec, form, variant, execution, cluster, measured, _host(run, device), copies,
        peak=_peak(run),
        attention=_attention(run),
        loads_all_kernels=_loads_all_kernels(run),
        tries_convolutions=_tries_convolutions(run, spec),
        assumed=", ".join(assumed),
    )  # fmt: skip


def execution_of(run: Run, precision: Precision, spec: str) -> Execution:
    """How a run was executed. Raises `TrainpaceError` for sizes that do not go together."""
    return _execution(run, precision, spec, read_parallelism(run.parallelism), None)[0]


def _execution(
    run: Run, precision: Precision, spec: str, stated: Parallelism, known: Named | None
) -> tuple[Execution, list[str]]:
    """(how a run was executed, what had to be assumed). Raises `TrainpaceError` for sizes that do not go together."""
    nodes = max(1, int(run.num_nodes or 1))
    gpus = max(1, int(run.num_gpus or 1))
    if gpus % nodes:
        raise TrainpaceError(f"{gpus} GPUs cannot be divided over {nodes} nodes.")
    shards = stated.tp * stated.pp * stated.cp
    if gpus % shards:
        raise TrainpaceError(f"{gpus} GPUs cannot be divided by tp x pp x cp = {shards}.")
    ranks = gpus // shards
    batch, accumulation, assumed = _batches(run, stated, ranks)
    stages, schedule = stages_of(stated, known.size.layers if known and known.size else None)
    if _is_neusight(run) and stated.pp > 1:
        schedule = "gpipe"
    if stated.activation_offload:
        raise TrainpaceError("activations offloaded to the host are not forecast.")
    distributed = "NeMo" in run.framework and not stated.zero_stage and ranks > 1
    if distributed:
        assumed.append("an optimizer distributed over the data-parallel ranks, as NeMo has by default")
    execution = Execution(
        micro_batch=batch,
        accumulation=accumulation,
        nnodes=nodes,
        nproc_per_node=gpus // nodes,
        tp=stated.tp,
        pp=stated.pp,
        cp=stated.cp,
        engine=_engine(run, spec),
        precision=precision,
        optimizer=_optimizer(run) if mode_of(run) == "train" else "none",
        zero_stage=1 if distributed else stated.zero_stage,
        shard_size=gpus // nodes if stated.sharded_in_node and nodes > 1 else None,
        reshard_after_forward=stated.reshard_after_forward,
        activation_checkpointing=stated.checkpointing,
        sequence_parallel=stated.tp > 1 and (stated.sequence_parallel or _always_divides_sequences(run)),
        async_tensor_parallel=stated.tp > 1 and (stated.async_tensor_parallel or _hides_tensor_exchanges(run)),
        pipeline_schedule=schedule,
        virtual_stages=stages,
        compile=run.compile in ("compile", "xla") or _fuses_by_hand(run),
        channels_last=run.memory_format == "nhwc" or run.framework.startswith("tensorflow"),
    )
    return execution, assumed


def _batches(run: Run, stated: Parallelism, ranks: int) -> tuple[int, int, list[str]]:
    """(micro-batch, accumulation, what was assumed).

    torchtitan states a rank's whole batch, which its pipelines cut into as many micro-batches as there are stages;
    NeuSight's rows on 4 GPUs state the global batch.
    """
    whole = global_batch(run)
    if _is_neusight(run) and (run.num_gpus or 1) > 1:
        whole = whole or run.batch_per_gpu
        pieces = stated.pp if whole and stated.pp > 1 and whole % stated.pp == 0 else 1
        if not whole or whole % (ranks * pieces):
            raise TrainpaceError(
                f"a global batch of {whole or 0:g} cannot be divided over {ranks * pieces} micro-batches."
            )
        return int(whole // ranks // pieces), pieces, [f"{pieces} micro-batches"] if pieces > 1 else []
    batch = run.batch_per_gpu
    if run.file == "torchtitan" and stated.pp > 1 and batch and batch % stated.pp == 0:
        return int(batch // stated.pp), stated.pp, [f"{stated.pp} micro-batches"]
    accumulation = run.grad_accum
    if accumulation is None and whole and batch:
        accumulation = whole / (batch * ranks)
        if accumulation != int(accumulation):
            raise TrainpaceError(
                f"a global batch of {whole:g} is not a multiple of {batch:g} samples on each of {ranks} ranks."
            )
    if accumulation is None and stated.pp > 1:
        raise TrainpaceError("the run states neither a global batch nor accumulation, which a pipeline needs.")
    accumulation = max(1, int(accumulation or 1))
    batch = batch or (whole or 0) / ranks / accumulation
    if batch < 1:
        raise TrainpaceError("the run states no batch size of at least 1 a GPU.")
    if batch != int(batch):
        raise TrainpaceError(f"a global batch of {whole:g} makes {batch:g} samples a rank.")
    return int(batch), accumulation, []


def global_batch(run: Run) -> float | None:
    """As stated; what the configuration says ("GBS=512") goes before the table's column."""
    own = re.search(r"\bGBS=(\d+)", run.model_variant_or_config)
    return float(own[1]) if own else run.global_batch


def _is_neusight(run: Run) -> bool:
    return run.file.startswith("neusight")


def _cuts_blocks(execution: Execution) -> bool:
    return execution.tp * execution.pp * execution.cp > 1


def _fuses_by_hand(run: Run) -> bool:
    """Megatron-LM's and NeMo's kernels join bias and GELU, bias, dropout and addition, scale, mask and softmax, as
    torch.compile would (Narayanan et al. 2021, section 4.2)."""
    return _is_megatron(run) or "NeMo" in run.framework


def _hides_tensor_exchanges(run: Run) -> bool:
    """Under a weight's gradient: Megatron-LM since the end of 2021 (Korthikanti et al. 2022, section 4.2.2), and NeMo."""
    return "NeMo" in run.framework or (_is_megatron(run) and "2205.05198" in run.framework_version)


def _always_divides_sequences(run: Run) -> bool:
    """torchtitan's tensor parallelism shards norms by the sequence, and so do NeMo's configurations."""
    return run.file == "torchtitan" or "NeMo" in run.framework


def _length(run: Run, spec: str) -> int | None:
    """Tokens a sample; torchtitan's tables leave out the default of its Llama 3 configurations."""
    if not run.seq_len and run.file == "torchtitan" and "llama-3" in spec:
        return TORCHTITAN_LENGTH
    return int(run.seq_len) if run.seq_len else None


def _counts_recomputation(run: Run, size: GptSize) -> bool:
    """Does a run that says nothing of recomputation state a rate that counts four passes in its time?"""
    if "ac=" in run.parallelism or not (run.step_time_ms and run.tflops_per_gpu and run.seq_len and run.num_gpus):
        return False
    counted = run.tflops_per_gpu * 1e12 * run.num_gpus * run.step_time_ms / 1e3
    return abs(size.step_flops(int(global_batch(run) or 0), int(run.seq_len)) / counted - 1) < 0.03


def _peak(run: Run) -> Peak:
    """Monitors count the driver's context; torchtitan logs what the allocator reserved."""
    if "DeepLearningExamples" in run.framework or "nvidia-smi" in run.notes:
        return "device"
    return "reserved" if run.file == "torchtitan" else "allocated"


def _loads_all_kernels(run: Run) -> bool:
    """torch before 1.13 was built for CUDA up to 11.6; Megatron's software says the year."""
    version = _torch_version(run)
    return _is_megatron(run) or (version is not None and version < (1, 13))


def _tries_convolutions(run: Run, spec: str) -> bool:
    """NVIDIA's examples of image networks switch it on in their training scripts (ConvNets/main.py, Detection/SSD/main.py)."""
    return "DeepLearningExamples" in run.framework and not spec.startswith("transformers:")


def _spec(run: Run, folder: Path) -> str:
    spec = run.model_spec or run.model
    if not run.model_spec and not (":" in spec or spec.endswith(".json")):
        raise TrainpaceError(f"no model definition is known for {run.model or 'a run without a name'!r}.")
    if run.framework.startswith("tensorflow") and re.fullmatch(r"torchvision:vgg\d+", spec):
        return f"{spec.removeprefix('torchvision:')}_keras"  # which has no pooling before its classifier
    if spec.startswith("transformers:"):
        name = spec.partition(":")[2]
        for file in (folder / name, folder / "models" / name, Path(name)):
            if file.is_file():
                return f"transformers:{file}"
        raise TrainpaceError(f"{spec}: there is no such file in {folder}.")
    if spec.endswith(".json") or ".py:" in spec:
        return str(folder / spec) if (folder / spec.rpartition(":")[0]).is_file() or (folder / spec).is_file() else spec
    return spec


def precision_of(run: Run, spec: str) -> Precision:
    """As stated; but NVIDIA's BERT examples run "AMP" as apex level O2, which is fp16 throughout with fp32 master weights, and
    DeepSpeed had 16-bit weights and gradients of either format before its BF16 optimizer."""
    if not run.precision:
        raise TrainpaceError("the run states no precision.")
    if run.precision not in PRECISIONS:
        raise TrainpaceError(f"precision {run.precision!r} is not one of {', '.join(PRECISIONS)}.")
    if run.precision == "fp8" and "rowwise" in run.notes:
        raise TrainpaceError(
            "FP8 with a scale for every row is not forecast: its quantising kernels are not in the trace."
        )
    if "DeepLearningExamples" in run.framework and spec.startswith("transformers:") and run.precision == "amp_fp16":
        return "fp16"
    if run.precision == "bf16" and _is_before_bf16_optimizer(run):
        return "fp16"
    return run.precision


def _is_before_bf16_optimizer(run: Run) -> bool:
    """BLOOM's trials kept 16-bit gradients, as in fp16, until DeepSpeed's BF16 optimizer was used from 28 February 2022 on
    (chronicles-prequel.md, "Rebalancing layers")."""
    day = re.search(r"\brow date 02-(\d+)", run.notes)
    return run.file == "bigscience_bloom" and day is not None and int(day[1]) < 28


def mode_of(run: Run) -> Mode:
    """Training, unless the run says otherwise."""
    name = run.mode
    if name in ("", "train"):
        return "train"
    if name in ("forward_backward", "inference"):
        return name  # type: ignore[return-value]
    raise TrainpaceError(f"mode {name!r} is not one of train, forward_backward, inference.")


def _optimizer(run: Run) -> str:
    name = run.optimizer.lower()
    if "adamw" in name or "lamb" in name:
        return "adamw"
    if "adam" in name:
        return "adam"
    if "sgd" in name:
        return "sgd_momentum" if "momentum" in name or "timm" in run.framework else "sgd"
    return "adamw" if run.seq_len else "sgd_momentum"


def _torch_version(run: Run) -> tuple[int, ...] | None:
    version = re.match(r"(?:torch |pytorch )?v?(\d+)\.(\d+)(?:\.(\d+))?", run.framework_version.strip())
    return None if version is None else tuple(int(part or 0) for part in version.groups())


def _host(run: Run, device: Device) -> Host:
    """A run on a card from before Ampere that states no version is taken to be as old as its card."""
    if run.framework.startswith("tensorflow"):
        return "tensorflow"
    version = _torch_version(run)
    if version is None:
        return "old_torch" if re.match(r"[1-7]\.", device.compute_capability) else ""
    return "old_torch" if version < (1, 10) else ""


def _is_legacy(run: Run, spec: str) -> bool:
    if _is_megatron(run):
        return True
    version = _torch_version(run)
    if version is None:
        return False
    return version < ((2, 1, 1) if spec.startswith("transformers:") else (2, 0, 0))


def _attention(run: Run) -> AttentionKernels:
    """llm-foundry's tables are of 2023, with FlashAttention's first version or Triton's of the same time."""
    if "NeMo" in run.framework:
        return "native"
    version = _torch_version(run)
    return "first" if run.file == "mosaic_llm_foundry" or (version is not None and version < (2, 2)) else ""


def _is_megatron(run: Run) -> bool:
    """Megatron-LM and Megatron-DeepSpeed of 2020 to 2022; NeMo's is another generation."""
    year = re.match(r"(\d{4})\b", run.framework_version)
    return "Megatron" in run.framework and (year is None or int(year[1]) <= 2022)


def _engine(run: Run, spec: str) -> Engine:
    """NVIDIA's BERT examples and Megatron-LM reduce one flat gradient after the backward pass; NeMo overlaps all it can."""
    if "DataParallel" in run.parallelism and "Distributed" not in run.parallelism:
        return "data_parallel"
    if "NeMo" in run.framework:
        return "megatron_core"
    flat = "DeepLearningExamples" in run.framework and spec.startswith("transformers:")
    return "unoverlapped" if flat or _is_megatron(run) else "ddp"


def network_gb_per_s(text: str, gpus_per_node: int) -> float | None:
    """GB/s a GPU from texts such as "1600 Gbps RoCE" (a node's), "4x Omni-Path 100 Gb/s per node" or "RDMA 400 Gb/s per
    GPU"; None where none is stated."""
    found = re.search(r"(?:(\d+)x\s*(?:[A-Za-z-]+\s+)?)?(\d+(?:\.\d+)?)\s*(?:Gbps|Gb/s|Gbit/s)", text)
    if found is None:
        return None
    stated = float(found[2]) * float(found[1] or 1) / 8
    return stated if "per GPU" in text else stated / gpus_per_node


def measured_ms(run: Run, execution: Execution, length: int | None = None, size: GptSize | None = None) -> float | None:
    """The step that a run states, or what its throughput makes it; None where it states neither.

    Tokens go before samples, which sources round to whole numbers. A rate of FLOPs becomes a time by the formula that the
    source counted them with (`GptSize.step_flops`), for models of known sizes.
    """
    if run.step_time_ms:
        return run.step_time_ms
    samples = global_batch(run) or execution.global_batch
    length = length or int(run.seq_len or 0)
    if run.tokens_per_sec and length:
        return 1e3 * samples * length / run.tokens_per_sec
    if run.samples_per_sec:
        return 1e3 * samples / run.samples_per_sec
    if run.tflops_per_gpu and size and length:
        passes = 4 if re.search(r"recomput", run.notes) and "x 3/4" not in run.notes else 3
        flops = size.step_flops(int(samples), length, passes)
        return 1e3 * flops / (run.tflops_per_gpu * 1e12 * execution.world_size)
    return None
