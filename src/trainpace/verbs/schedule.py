"""`schedule`: compute steps, hours and dollars of a training, or solve for a missing number."""

from typing import Annotated, NamedTuple

from msgspec.structs import replace

from trainpace.job import ONLY_STEPS, Answer, Question, Schedule, SpeedUp, answer
from trainpace.verbs.request import COUNT, DURATION, RATIO, USD, Field, Group, Progress, Request
from trainpace.verbs.settings import SettingsSource

Count = int | None
Seconds = float | None


class ScheduleRequest(Request):
    """Request for the time and cost of a training. One number may be missing."""

    config: Annotated[
        tuple[str, ...],
        Field("Read a settings file; repeat for several.", metavar="FILE", group=Group.NOW),
    ] = ()
    command: Annotated[
        str | None,
        Field("A launch command: 'torchrun --nnodes 2 train.py'.", metavar="TEXT", group=Group.NOW),
    ] = None
    samples: Annotated[
        Count, Field("Samples in an epoch: 50000, 1.28M.", COUNT, group=Group.LENGTH)
    ] = None
    tokens: Annotated[
        Count,
        Field(
            "Tokens per epoch: 300B, with `sequence_length`.",
            COUNT,
            excludes=("samples",),
            group=Group.LENGTH,
        ),
    ] = None
    sequence_length: Annotated[Count, Field("Tokens in a sample.", COUNT, group=Group.LENGTH)] = (
        None
    )
    epochs: Annotated[
        float | None, Field("Passes over the data; may be fractional.", group=Group.LENGTH)
    ] = None
    max_steps: Annotated[
        Count,
        Field(
            "Stop after this many optimizer updates.",
            COUNT,
            overrides=("epochs",),
            group=Group.LENGTH,
        ),
    ] = None
    micro_batch: Annotated[
        Count, Field("Samples per GPU and forward pass.", COUNT, group=Group.BATCH)
    ] = None
    accumulate: Annotated[
        Count, Field("Micro-batches per optimizer update.", COUNT, group=Group.BATCH)
    ] = None
    global_batch: Annotated[
        Count, Field("Samples per optimizer update, over all GPUs.", COUNT, group=Group.BATCH)
    ] = None
    nnodes: Annotated[Count, Field("Nodes.", COUNT, group=Group.GPUS)] = None
    nproc_per_node: Annotated[
        Count, Field("Processes (GPUs) per node.", COUNT, group=Group.GPUS)
    ] = None
    tp: Annotated[int, Field("Tensor-parallel size.", COUNT, show_default=False)] = 1
    pp: Annotated[int, Field("Pipeline-parallel size.", COUNT, show_default=False)] = 1
    cp: Annotated[int, Field("Context-parallel size.", COUNT, show_default=False)] = 1
    drop_last: Annotated[
        bool, Field("Drop the last micro-batch of an epoch if it is not full.")
    ] = False
    drop_partial_accumulation: Annotated[
        bool, Field("Drop micro-batches that do not fill an update.")
    ] = False
    step_time: Annotated[
        Seconds, Field("Time of one update: 210ms.", DURATION, group=Group.CHOICE)
    ] = None
    throughput: Annotated[
        float | None, Field("Samples per second, over all GPUs.", group=Group.CHOICE)
    ] = None
    epoch_time: Annotated[
        Seconds,
        Field("Time of one epoch: 10.7h.", DURATION, overrides=("step_time",), group=Group.CHOICE),
    ] = None
    startup: Annotated[float, Field("Once per run: imports, compilation, loading.", DURATION)] = 0.0
    evaluate_every: Annotated[Count, Field("Steps between evaluations.", COUNT)] = None
    evaluation_time: Annotated[float, Field("Time of one evaluation.", DURATION)] = 0.0
    checkpoint_every: Annotated[Count, Field("Steps between checkpoints.", COUNT)] = None
    checkpoint_time: Annotated[float, Field("Time of one checkpoint.", DURATION)] = 0.0
    mtbf: Annotated[Seconds, Field("Mean time between failures of the whole job.", DURATION)] = None
    restart_time: Annotated[float, Field("Time to restart after a failure.", DURATION)] = 0.0
    repeats: Annotated[
        int, Field("Models, folds or seeds trained one after another.", COUNT, show_default=False)
    ] = 1
    deadline: Annotated[
        Seconds,
        Field(
            "Time available. One missing number is computed from it.", DURATION, group=Group.CHOICE
        ),
    ] = None
    budget: Annotated[
        float | None, Field("Money available.", USD, needs=("price",), group=Group.CHOICE)
    ] = None
    price: Annotated[float | None, Field("Dollars per GPU and hour.", USD, group=Group.CHOICE)] = (
        None
    )
    solve_gpus: Annotated[
        bool,
        Field("Find the number of data-parallel GPUs that meets the deadline.", group=Group.CHOICE),
    ] = False
    keep_global_batch: Annotated[
        bool, Field("More GPUs take over accumulation steps.", needs=("solve_gpus",))
    ] = False
    speedup: Annotated[
        tuple[float, ...], Field("Apply a measured speed-up: 3.63x or 363% (the same).", RATIO)
    ] = ()
    learning_rate: Annotated[float | None, Field("Learning rate tuned at `base_global_batch`.")] = (
        None
    )
    base_global_batch: Annotated[
        Count, Field("Global batch at which the learning rate was tuned.", COUNT)
    ] = None


class Scheduled(NamedTuple):
    answer: Answer
    files: SettingsSource


def run(request: ScheduleRequest, progress: Progress) -> Scheduled:
    files = SettingsSource.read(request.config, request.command)
    return Scheduled(answer(_question(request, files)), files)


def _question(r: ScheduleRequest, files: SettingsSource) -> Question:
    """Build the question from the request and the settings files.

    Raises:
        Contradiction: They disagree.
    """
    pick = files.pick
    schedule = Schedule(
        samples=r.samples,
        tokens=r.tokens,
        sequence_length=pick("sequence_length", r.sequence_length),
        epochs=pick("epochs", r.epochs),
        max_steps=pick("max_steps", r.max_steps),
        drop_last=bool(pick("drop_last", r.drop_last or None)),
        partial_accumulation="drop" if r.drop_partial_accumulation else "step",
    )
    conditions = replace(
        ONLY_STEPS,
        startup_s=r.startup,
        evaluate_every_steps=pick("evaluate_every_steps", r.evaluate_every),
        evaluation_s=r.evaluation_time,
        checkpoint_every_steps=pick("checkpoint_every_steps", r.checkpoint_every),
        checkpoint_s=r.checkpoint_time,
        mean_time_between_failures_s=r.mtbf,
        restart_s=r.restart_time,
        repeats=r.repeats,
        price_usd_per_device_hour=r.price,
    )
    nnodes, nproc = files.world(r.nnodes, r.nproc_per_node)
    sizes = {
        name: pick(name, None if getattr(r, name) == 1 else getattr(r, name)) or 1
        for name in ("tp", "pp", "cp")
    }
    return Question(
        schedule=schedule,
        conditions=conditions,
        micro_batch=pick("micro_batch", r.micro_batch),
        accumulation=pick("accumulation", r.accumulate),
        global_batch=pick("global_batch", r.global_batch),
        nnodes=nnodes,
        nproc_per_node=nproc,
        **sizes,
        step_time_s=r.step_time,
        throughput_samples_per_s=r.throughput,
        epoch_time_s=r.epoch_time,
        deadline_s=r.deadline if r.deadline is not None else files.value("time_limit_s"),
        budget_usd=r.budget,
        speedups=tuple(SpeedUp(ratio=ratio) for ratio in r.speedup),
        solve_gpus=r.solve_gpus,
        keep_global_batch=r.keep_global_batch,
        learning_rate=pick("learning_rate", r.learning_rate),
        base_global_batch=r.base_global_batch,
    )
