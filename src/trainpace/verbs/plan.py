"""`plan`: what to change about a training, in which order, and what each change saves."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import replace

from trainpace.execution import Checkpointing, Precision, ZeroStage
from trainpace.plan import Freedom, Plan, Setting, plan_changes
from trainpace.records import Record
from trainpace.verbs.executed import Network, Offload
from trainpace.verbs.own_hardware import HardwareFile
from trainpace.verbs.plan_inputs import Present, cluster_of, data_paths, noise_scale_of, schedule_of, script_changes
from trainpace.verbs.progress import Progress
from trainpace.verbs.request import Field, Misuse, Unit
from trainpace.verbs.traced import workload_of
from trainpace.verbs.training import TrainingRequest, conditions_of
from trainpace.verbs.units import ABOVE_0, AT_LEAST_1, COUNT, DEVICES, USD, within
from trainpace.workload import Form, Variant, form_of

if TYPE_CHECKING:
    pass

NOISE_SCALE = Unit("samples", str)


class PlanRequest(TrainingRequest):
    """A training as it runs now, the fleet that it may use, and what may be changed."""

    gpu: Annotated[str | None, Field("The GPU of the fleet, by name.")] = None
    num_gpus: Annotated[int | None, Field("GPUs of a node of the fleet.  [default: 1]", DEVICES)] = None
    nodes: Annotated[int | None, Field("Nodes of the fleet.  [default: 1]", DEVICES)] = None
    network: Network = None
    cluster: Annotated[
        str | None,
        Field("The fleet from a file: gpu, num_gpus, nodes, network_gb_per_s, price.", metavar="FILE.toml"),
    ] = None  # fmt: skip
    hardware: HardwareFile = None
    price: Annotated[float | None, Field("Dollars per GPU and hour.", USD)] = None
    config: Annotated[tuple[str, ...], Field("How it trains now: a settings file; several.", metavar="FILE")] = ()
    command: Annotated[str | None, Field("How it trains now: a launch command.", metavar="TEXT")] = None
    watched: Annotated[
        str | None,
        Field("How it trains now: a recording (trainpace watch), its loader included.", metavar="FOLDER"),
    ] = None  # fmt: skip
    batch: Annotated[
        int | None,
        Field("Samples per GPU and forward pass now.  [default: 32]", AT_LEAST_1, execution="micro_batch"),
    ] = None  # fmt: skip
    accumulate: Annotated[
        int | None, Field("Micro-batches per update now.  [default: 1]", AT_LEAST_1, execution="accumulation")
    ] = None
    global_batch: Annotated[
        int | None, Field("Samples per update over all GPUs, in place of `accumulate`.", AT_LEAST_1)
    ] = None
    gpus_now: Annotated[int | None, Field("GPUs of a node that it trains on now.  [default: the fleet's]", DEVICES)] = (
        None
    )
    nodes_now: Annotated[int | None, Field("Nodes that it trains on now.  [default: the fleet's]", DEVICES)] = None
    precision: Annotated[
        Precision | None, Field("Number format now.  [default: fp32]", execution="precision")
    ] = None  # fmt: skip
    zero: Annotated[
        ZeroStage | None,
        Field("ZeRO stage now; 3 is FSDP's full sharding.  [default: 0]", execution="zero_stage"),
    ] = None  # fmt: skip
    tp: Annotated[int | None, Field("Tensor-parallel size now.", AT_LEAST_1, execution="tp")] = None
    pp: Annotated[int | None, Field("Pipeline-parallel size now.", AT_LEAST_1, execution="pp")] = None
    cp: Annotated[int | None, Field("Context-parallel size now.", AT_LEAST_1, execution="cp")] = None
    checkpointing: Annotated[
        Checkpointing | None, Field("What is recomputed now.", execution="activation_checkpointing")
    ] = None
    offload: Annotated[
        Offload | None, Field("What is kept in the host's memory now.", execution="offload_optimizer")
    ] = None
    compile: Annotated[bool, Field("torch.compile is used now.", execution="compile")] = False
    channels_last: Annotated[bool, Field("NHWC tensors are used now.", execution="channels_last")] = False
    workers: Annotated[int | None, Field("Loader workers now. Needs `sample_ms`.", COUNT)] = None
    sample_ms: Annotated[
        float | None,
        Field("Milliseconds of a core for a sample (trainpace loader measures it).", within("ms", ABOVE_0, 1e9)),
    ] = None  # fmt: skip
    cores: Annotated[int | None, Field("Cores of a node that its loaders may use. With `sample_ms`.", AT_LEAST_1)] = (
        None
    )
    samples: Annotated[int | None, Field("Samples in an epoch.", AT_LEAST_1)] = None
    tokens: Annotated[int | None, Field("Tokens in an epoch, for transformers.", AT_LEAST_1)] = None
    max_steps: Annotated[int | None, Field("Updates, in place of `epochs` or as their limit.", AT_LEAST_1)] = None
    allow_global_batch: Annotated[bool, Field("Also look at multiples of the global batch.")] = False
    noise_scale: Annotated[
        str | None,
        Field("With `allow_global_batch`: count to the same loss, by this gradient noise scale (trainpace measure"
              " --noise-scale --output FILE.json, or the ladder.json of trainpace run).", NOISE_SCALE,
              metavar="SAMPLES|FILE.json"),
    ] = None  # fmt: skip
    allow_fp8: Annotated[bool, Field("Also look at FP8.")] = False
    keep: Annotated[
        tuple[str, ...],
        Field("Leave this as it is: GPUs, precision, compile, 'micro-batch', ...; several.", metavar="WHAT"),
    ] = ()  # fmt: skip
    simplest: Annotated[bool, Field("Order the changes to the simplest choice, not to the best.")] = False


class Planned(Record):
    """A plan, what it was made for, and what to change in the script itself, each with the seconds of the job that it saves."""

    plan: Plan
    setting: Setting
    script_changes: tuple[tuple[Any, float], ...]


def run(request: PlanRequest, progress: Progress) -> Planned:
    r = request
    if isinstance(r.model, str) and Path(r.model).is_dir():
        raise Misuse(f"{r.model} is a folder: name the model, and a recording's folder with `watched`.")
    noise_scale = noise_scale_of(r)
    present = Present.read(r)
    freedom = Freedom(keep=r.keep, allow_global_batch=r.allow_global_batch, allow_fp8=r.allow_fp8)
    cluster = cluster_of(r, present)
    schedule = schedule_of(r, present)
    forms: tuple[Form, ...] = ("half",) if form_of(present.precision(r)) == "half" else ("fp32", "amp")
    if r.allow_fp8 and "half" not in forms:
        forms = (*forms, "half")
    optimizer = present.pick("optimizer", r.optimizer)
    variant = Variant(optimizer, schedule.sequence_length, r.image_size)
    workload = workload_of(replace(r, optimizer=optimizer), progress, forms, variant)
    start = present.execution(r, cluster, workload)
    setting = Setting(workload, cluster, schedule, noise_scale=noise_scale, conditions=conditions_of(r))
    plan = plan_changes(
        setting, start, data_paths(r, present, start, cluster), freedom, to="simplest" if r.simplest else "best"
    )
    return Planned(
        plan=replace(plan, model=r.model_name), setting=setting,
        script_changes=tuple(script_changes(present, start, schedule)),
    )  # fmt: skip
