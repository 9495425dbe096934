"""`schedule`: compute steps, hours and dollars of a training, or solve for a missing number."""

from typing import Annotated, NamedTuple

from msgspec.structs import replace

from trainpace.core.records import common_fields
from trainpace.job import ONLY_STEPS, Answer, Question, Schedule, SpeedUp, answer
from trainpace.verbs.request import COUNT, DURATION, RATIO, USD, Field, Progress, Request
from trainpace.verbs.settings import SettingsSource

Count = int | None
Seconds = float | None


class ScheduleRequest(Request):
    """Request for the time and cost of a training. One number may be missing."""

    groups = (
        "How it trains now: config command; "
        "Training length: samples tokens sequence_length epochs max_steps; "
        "Batch: micro_batch accumulate global_batch; "
        "GPUs: nnodes nproc_per_node; "
        "Goal and limits: step_time throughput epoch_time deadline budget price solve_gpus"
    )

    config: Annotated[
        tuple[str, ...], Field("Read a settings file; repeat for several.", metavar="FILE")
    ] = ()
    command: Annotated[
        str | None, Field("A launch command: 'torchrun --nnodes 2 train.py'.", metavar="TEXT")
    ] = None
    samples: Annotated[Count, Field("Samples in an epoch: 50000, 1.28M.", COUNT)] = None
    tokens: Annotated[
        Count, Field("Tokens per epoch: 300B, with `sequence_length`.", COUNT, excludes="samples")
    ] = None
    sequence_length: Annotated[Count, Field("Tokens in a sample.", COUNT)] = None
    epochs: Annotated[float | None, Field("Passes over the data; may be fractional.")] = None
    max_steps: Annotated[
        Count, Field("Stop after this many optimizer updates.", COUNT, overrides="epochs")
    ] = None
    micro_batch: Annotated[Count, Field("Samples per GPU and forward pass.", COUNT)] = None
    accumulate: Annotated[
        Count, Field("Micro-batches per optimizer update.", COUNT, sets="accumulation")
    ] = None
    global_batch: Annotated[Count, Field("Samples per optimizer update, over all GPUs.", COUNT)] = (
        None
    )
    nnodes: Annotated[Count, Field("Nodes.", COUNT)] = None
    nproc_per_node: Annotated[Count, Field("Processes (GPUs) per node.", COUNT)] = None
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
        Seconds, Field("Time of one update: 210ms.", DURATION, sets="step_time_s")
    ] = None
    throughput: Annotated[
        float | None, Field("Samples per second, over all GPUs.", sets="throughput_samples_per_s")
    ] = None
    epoch_time: Annotated[
        Seconds,
        Field("Time of one epoch: 10.7h.", DURATION, overrides="step_time", sets="epoch_time_s"),
    ] = None
    startup: Annotated[
        float, Field("Once per run: imports, compilation, loading.", DURATION, sets="startup_s")
    ] = 0.0
    evaluate_every: Annotated[
        Count, Field("Steps between evaluations.", COUNT, sets="evaluate_every_steps")
    ] = None
    evaluation_time: Annotated[
        float, Field("Time of one evaluation.", DURATION, sets="evaluation_s")
    ] = 0.0
    checkpoint_every: Annotated[
        Count, Field("Steps between checkpoints.", COUNT, sets="checkpoint_every_steps")
    ] = None
    checkpoint_time: Annotated[
        float, Field("Time of one checkpoint.", DURATION, sets="checkpoint_s")
    ] = 0.0
    mtbf: Annotated[
        Seconds,
        Field(
            "Mean time between failures of the whole job.",
            DURATION,
            sets="mean_time_between_failures_s",
        ),
    ] = None
    restart_time: Annotated[
        float, Field("Time to restart after a failure.", DURATION, sets="restart_s")
    ] = 0.0
    repeats: Annotated[
        int, Field("Models, folds or seeds trained one after another.", COUNT, show_default=False)
    ] = 1
    deadline: Annotated[
        Seconds,
        Field(
            "Time available. One missing number is computed from it.", DURATION, sets="deadline_s"
        ),
    ] = None
    budget: Annotated[
        float | None, Field("Money available.", USD, needs="price", sets="budget_usd")
    ] = None
    price: Annotated[
        float | None, Field("Dollars per GPU and hour.", USD, sets="price_usd_per_device_hour")
    ] = None
    solve_gpus: Annotated[
        bool, Field("Find the number of data-parallel GPUs that meets the deadline.")
    ] = False
    keep_global_batch: Annotated[
        bool, Field("More GPUs take over accumulation steps.", needs="solve_gpus")
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
    given = common_fields(r, Schedule)
    picked = {name: pick(name, given[name]) for name in ("sequence_length", "epochs", "max_steps")}
    schedule = Schedule(
        **given | picked | {"drop_last": bool(pick("drop_last", r.drop_last or None))},
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
    given = common_fields(r, Question)
    for name in ("tp", "pp", "cp"):
        given[name] = pick(name, None if given[name] == 1 else given[name]) or 1
    for name in ("micro_batch", "global_batch", "learning_rate"):
        given[name] = pick(name, given[name])
    given["nnodes"], given["nproc_per_node"] = files.world(r.nnodes, r.nproc_per_node)
    accumulation = pick("accumulation", r.accumulate)
    if not r.solve_gpus:
        counts = ["micro_batch", "global_batch", "nnodes", "nproc_per_node"]
        counts += [name for name in ("tp", "pp", "cp") if given[name] > 1]
        files.check_counts({name: given[name] for name in counts} | {"accumulation": accumulation})
    return Question(
        **given,
        schedule=schedule,
        conditions=conditions,
        accumulation=accumulation,
        step_time_s=r.step_time,
        throughput_samples_per_s=r.throughput,
        epoch_time_s=r.epoch_time,
        deadline_s=r.deadline if r.deadline is not None else files.value("time_limit_s"),
        budget_usd=r.budget,
        speedups=tuple(SpeedUp(ratio=ratio) for ratio in r.speedup),
    )
