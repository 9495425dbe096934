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
from trainpace.execution import PRECISIONS, Checkpointing, Engine, Execution, Precision
from trainpace.hardware import Cluster, Device, find_device
from trainpace.validation.runs import Run
from trainpace.workload import Form, Mode, Variant, form_of

TYPICAL_NETWORK_GB_PER_S = 25.0
"""A GPU's share of a node's network where the run does not state it: 1600 Gbit/s over 8 GPUs, as large A100 clusters have."""

Host = Literal["", "old_torch", "tensorflow"]
"""Software that launches slower than today's torch."""


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
    memory_of_device: bool = False
    """Is the run's peak what the device's monitor showed, the driver's and the allocator's share included?"""

    assumed: str = ""
    """What the run does not state and its forecast needed."""

    @property
    def trace_key(self) -> tuple[str, Form, Variant]:
        """Cases with the same key share one traced workload."""
        return self.spec, self.form, self.variant


def case_of(run: Run, folder: Path) -> Case:
    """The case of a run; `TrainpaceError` says in one sentence why it cannot be forecast.

    `folder` is where ``transformers:FILE.json`` is looked for.
    """
    spec = _spec(run, folder)
    precision = precision_of(run, spec)
    device = find_device(run.gpu_canonical or run.gpu)
    execution = execution_of(run, precision, spec)
    mode = mode_of(run)
    form: Form = form_of(precision)
    variant = Variant(
        optimizer=_optimizer(run) if mode == "train" else "sgd",
        sequence_length=int(run.seq_len) if run.seq_len and spec.startswith("transformers:") else None,
        image_size=int(run.img_size) if run.img_size and not spec.startswith("transformers:") else None,
        mode=mode,
        legacy=_is_legacy(run, spec),
        checkpointing=execution.activation_checkpointing == "full",
    )
    network, assumed = _network(run, execution.nproc_per_node), ""
    if network is None and execution.nnodes > 1:
        network, assumed = TYPICAL_NETWORK_GB_PER_S, f"a network of {TYPICAL_NETWORK_GB_PER_S:g} GB/s a GPU"
    cluster = Cluster(
        device=device,
        devices_per_node=execution.nproc_per_node,
        nodes=execution.nnodes,
        network_gb_per_s_per_device=network,
    )
    copies = bool(re.search(r"\bH2D copy\b|\bhost feed\b", run.notes))
    return Case(
        run, spec, form, variant, execution, cluster, measured_ms(run, execution), _host(run, device), copies,
        memory_of_device="DeepLearningExamples" in run.framework,
        assumed=assumed,
    )  # fmt: skip


def execution_of(run: Run, precision: Precision, spec: str) -> Execution:
    """How a run was executed. Raises `TrainpaceError` for sizes that do not go together."""
    nodes = max(1, int(run.num_nodes or 1))
    gpus = max(1, int(run.num_gpus or 1))
    if gpus % nodes:
        raise TrainpaceError(f"{gpus} GPUs cannot be divided over {nodes} nodes.")
    shape = _parallelism(run.parallelism)
    shards = shape["tp"] * shape["pp"] * shape["cp"]
    if gpus % shards:
        raise TrainpaceError(f"{gpus} GPUs cannot be divided by tp x pp x cp = {shards}.")
    accumulation = max(1, int(run.grad_accum or 1))
    batch = run.batch_per_gpu or (run.global_batch or 0) / (gpus // shards) / accumulation
    if batch < 1:
        raise TrainpaceError("the run states no batch size of at least 1 a GPU.")
    return Execution(
        micro_batch=int(batch),
        accumulation=accumulation,
        nnodes=nodes,
        nproc_per_node=gpus // nodes,
        tp=shape["tp"],
        pp=shape["pp"],
        cp=shape["cp"],
        engine=_engine(run, spec),
        precision=precision,
        optimizer=_optimizer(run) if mode_of(run) == "train" else "none",
        zero_stage=shape["zero"],  # type: ignore[arg-type]
        activation_checkpointing=_checkpointing(run.parallelism),
        compile=run.compile in ("compile", "xla"),
        channels_last=run.memory_format == "nhwc" or run.framework.startswith("tensorflow"),
    )


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
    """As stated; but NVIDIA's BERT examples run "AMP" as apex level O2, which is fp16 throughout with fp32 master weights."""
    if not run.precision:
        raise TrainpaceError("the run states no precision.")
    if run.precision not in PRECISIONS:
        raise TrainpaceError(f"precision {run.precision!r} is not one of {', '.join(PRECISIONS)}.")
    if "DeepLearningExamples" in run.framework and spec.startswith("transformers:") and run.precision == "amp_fp16":
        return "fp16"
    return run.precision


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
    version = _torch_version(run)
    if version is None:
        return False
    return version < ((2, 1, 1) if spec.startswith("transformers:") else (2, 0, 0))


def _parallelism(text: str) -> dict[str, int]:
    sizes = {"tp": 1, "pp": 1, "cp": 1, "zero": 0}
    for name in ("tp", "pp", "cp", "zero"):
        found = re.search(rf"(?<![a-z_]){name}=(\d+)", text)
        if found:
            sizes[name] = int(found[1])
    if re.search(r"\bfsdp\b", text) and "NO_SHARD" not in text:
        sizes["zero"] = 3
    if sizes["zero"] > 3 or 0 in (sizes["tp"], sizes["pp"], sizes["cp"]):
        raise TrainpaceError(f"parallelism {text!r} is not understood.")
    return sizes


def _checkpointing(text: str) -> Checkpointing:
    """Selective checkpointing keeps the products and repeats what is cheap: in time it is near to none."""
    return "full" if re.search(r"\bac=full", text) else "none"


def _engine(run: Run, spec: str) -> Engine:
    """NVIDIA's BERT examples reduce one flat gradient after the backward pass."""
    if "DataParallel" in run.parallelism and "Distributed" not in run.parallelism:
        return "data_parallel"
    return "unoverlapped" if "DeepLearningExamples" in run.framework and spec.startswith("transformers:") else "ddp"


def _network(run: Run, gpus_per_node: int) -> float | None:
    """GB/s a GPU from texts such as "1600 Gbps RoCE" (a node's) or "RDMA 400 Gb/s per GPU"; None where none is stated."""
    found = re.search(r"(\d+(?:\.\d+)?)\s*(?:Gbps|Gb/s|Gbit/s)", run.interconnect)
    if found is None:
        return None
    per_device = float(found[1]) / 8
    return per_device if "per GPU" in run.interconnect else per_device / gpus_per_node


def measured_ms(run: Run, execution: Execution) -> float | None:
    """The step that a run states, or what its throughput makes it; None where it states neither."""
    if run.step_time_ms:
        return run.step_time_ms
    samples = run.global_batch or execution.global_batch
    if run.samples_per_sec:
        return 1e3 * samples / run.samples_per_sec
    if run.tokens_per_sec and run.seq_len:
        return 1e3 * samples * run.seq_len / run.tokens_per_sec
    return None
