"""A ladder: the setup of a training, the changes to try in turn, what a change makes of a setup, and what launches it."""

import itertools
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import Contradiction, TrainpaceError, UnknownName
from trainpace.core.execution import Execution
from trainpace.core.records import Record
from trainpace.job import ASSUMED, JobConditions, Schedule
from trainpace.run.job import Launcher, ThisMachine, Torchrun
from trainpace.run.slurm import Slurm, SlurmOptions
from trainpace.run.trial import EngineName, LoaderSettings, Trial, engine_for

Value = str | int | bool | float | None
Changes = dict[str, Value | tuple[Value, ...]]

EXECUTION_KEYS = tuple(name for name in Execution.__struct_fields__ if name != "engine")
LOADER_KEYS = LoaderSettings.__struct_fields__
KEYS = (*EXECUTION_KEYS, *LOADER_KEYS, "engine", "threads", "global_batch")
"""What a rung may change. `engine` is the trial's (plain, ddp, fsdp2, deepspeed), not the execution's."""
MOST_ALTERNATIVES = 16
SHARDS = "{shards}"
TRAINPACES_OWN = (
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "WANDB_MODE",
    "COMET_MODE",
    "MLFLOW_TRACKING_URI",
)
"""Variables that a trial of an unchanged script sets, besides those that begin with TRAINPACE_."""


class Setup(Record):
    """What one trial needs. `engine` None is the usual one for the execution; `threads` None an even share of the cores.
    `settings`: further keys of a script's own settings files, with dots between sections, and their values, in which {shards}
    stands for the folder of the shards. `environment`: variables of its processes, as of the memory allocator.
    """

    task: str
    execution: Execution
    engine: EngineName | None = None
    loader: LoaderSettings = LoaderSettings()
    threads: int | None = None
    settings: dict[str, Value] = msgspec.field(default_factory=dict)
    environment: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def own_settings(self) -> dict[str, Value]:
        """`settings`, without those that only name the shards, and `environment`: nobody but the script and its libraries knows
        what they change of a step."""
        return {
            key: value for key, value in self.settings.items() if SHARDS not in str(value)
        } | self.environment

    def trial(self, **rest: Any) -> Trial:
        """The trial of this setup; `rest` are Trial's fields that say how long and on what device."""
        return Trial(
            task=self.task,
            execution=self.execution,
            engine=self.engine or engine_for(self.execution),
            loader=self.loader,
            threads_per_process=self.threads,
            **rest,
        )


class Script(Record):
    """An unchanged script: the command that trains, and the settings files that it reads, both as seen from `folder`."""

    command: str
    configs: tuple[str, ...] = ()
    folder: str = "."


class Rung(Record):
    """One change to try. A tuple of values is a choice, of which the best is kept; several tuples are all their combinations.
    `precompute` names a dataset, FILE.py:NAME, whose samples are made into shards first; they then take its place. `settings` and
    `environment` are those of `Setup`, for a script."""

    title: str
    changes: Changes
    precompute: str = ""
    settings: dict[str, Value] = msgspec.field(default_factory=dict)
    environment: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in self.changes.items():
            if key not in KEYS:
                raise UnknownName("setting of a rung", key, KEYS)
            if value == ():
                raise TrainpaceError(f"the rung {self.title!r} gives {key} no value to try.")
        if not (self.changes or self.precompute or self.settings or self.environment):
            raise TrainpaceError(
                f"the rung {self.title!r} changes nothing.",
                "Name a setting, precompute or environment.",
            )
        for name in self.environment:
            if not (name.isascii() and name.isidentifier()):
                raise TrainpaceError(
                    f"the rung {self.title!r} sets {name!r}, which cannot be the name of an"
                    " environment variable."
                )
            if name in TRAINPACES_OWN or name.startswith("TRAINPACE_"):
                raise TrainpaceError(
                    f"the rung {self.title!r} sets {name}, which Trainpace sets itself in trials.",
                    "Use threads for OMP_NUM_THREADS; leave the others out.",
                )
        if len(self.alternatives()) > MOST_ALTERNATIVES:
            raise TrainpaceError(
                f"the rung {self.title!r} has {len(self.alternatives())} alternatives, of at most"
                f" {MOST_ALTERNATIVES}.",
                "Try fewer values, or spread them over several rungs.",
            )

    @property
    def takes_shards(self) -> bool:
        """Whether one of the script's own settings is given the folder of the shards."""
        return any(isinstance(value, str) and SHARDS in value for value in self.settings.values())

    def alternatives(self) -> tuple[dict[str, Value], ...]:
        choices = [v if isinstance(v, tuple) else (v,) for v in self.changes.values()]
        return tuple(
            dict(zip(self.changes, values, strict=True)) for values in itertools.product(*choices)
        )


class Ladder(Record):
    """The setup to start from, the rungs to try in turn, and the whole job that they are for.

    `job` None: no hours and dollars of a whole job; `conditions`: what it does besides steps. `price_usd_per_hour` is for one
    node. `loss_tolerance` is a share of the baseline's first loss (see `judging`). Each trial trains for about `seconds`, or for
    `steps`, after `warmup_steps`; all have `seed`, but for the baseline's second trial, which has the next one. `script`: what is
    trained, where it is no task; a task beside it is the model for forecasts, "" for none.
    """

    start: Setup
    rungs: tuple[Rung, ...]
    job: Schedule | None = None
    conditions: JobConditions = ASSUMED
    price_usd_per_hour: float | None = None
    loss_tolerance: float = 0.1
    seconds: float = 8.0
    warmup_steps: int = 3
    seed: int = 0
    device: str = "cpu"
    allow_global_batch: bool = False
    slurm: SlurmOptions = SlurmOptions()
    steps: int | None = None
    script: Script | None = None

    @property
    def name(self) -> str:
        return self.start.task if self.script is None else self.script.command

    def __post_init__(self) -> None:
        if self.steps is not None and not 5 <= self.steps <= 100_000:
            raise TrainpaceError(f"a trial of {self.steps} steps cannot be.", "Give 5 or more.")
        if not 0 < self.seconds < float("inf"):
            raise TrainpaceError(f"a trial of {self.seconds} s cannot be.", "Give seconds above 0.")
        if not 0 < self.loss_tolerance < 10:
            raise TrainpaceError(
                f"a loss tolerance of {self.loss_tolerance} cannot be right.",
                "It is a share: 0.1 is 10 %.",
            )
        if self.price_usd_per_hour is not None and not 0 <= self.price_usd_per_hour <= 1e6:
            raise TrainpaceError(
                f"a price of {self.price_usd_per_hour} dollars an hour cannot be right."
            )
        for rung in self.rungs:
            shards = rung.precompute or "shards" in rung.changes
            if self.script is None and (rung.settings or rung.environment):
                what = (
                    "settings of a script's own files"
                    if rung.settings
                    else "environment variables of a script"
                )
                raise TrainpaceError(
                    f"the rung {rung.title!r} sets {what}, and this ladder trains a task.",
                    "Name the script with command and config.",
                )
            if self.script is not None and shards and not rung.takes_shards:
                raise TrainpaceError(
                    f"an unchanged script reads its own data, and the rung {rung.title!r} does not"
                    " say which setting of the script's own names the shards in its place.",
                    'Say it: settings = {"data.shards" = "{shards}"}, or name a task in place of'
                    " the command.",
                )
            if rung.takes_shards and not shards:
                raise TrainpaceError(
                    f"the rung {rung.title!r} has no shards to name.",
                    'Add precompute = "FILE.py:NAME".',
                )
        if self.warmup_steps < 1:
            raise TrainpaceError("a trial needs at least 1 step of warm-up, which is not counted.")


def changed(kept: Setup, changes: dict[str, Value], allow_global_batch: bool = False) -> Setup:
    """`kept` with one alternative's values, at the same global batch unless a new one is allowed. Where ranks or micro-batch
    change, accumulation makes up for it, then the micro-batch, which becomes the largest that divides a rank's share; neither
    touches a value that `changes` gives. Raises Contradiction where no whole numbers do."""
    fields = {k: v for k, v in changes.items() if k in EXECUTION_KEYS}
    loader = _built(
        LoaderSettings, kept.loader, {k: v for k, v in changes.items() if k in LOADER_KEYS}
    )
    setup = _built(
        Setup,
        kept,
        {"loader": loader} | {k: v for k, v in changes.items() if k in ("engine", "threads")},
    )
    batch = changes.get("global_batch", kept.execution.global_batch)
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise TrainpaceError(f"global_batch is {batch}; it must be a whole number from 1.")
    ranks = fields.keys() & {"nnodes", "nproc_per_node"}
    # a shard size may clash with other ranks, and the engine that was named for another execution need not have this one
    free = _built(Execution, kept.execution, ({"shard_size": None} if ranks else {}) | fields)
    if "engine" not in changes and (
        ranks or fields.keys() & {"zero_stage", "offload_optimizer", "offload_parameters"}
    ):
        setup = replace(setup, engine=None)
    execution = _at_global_batch(free, batch, fields, allow_global_batch)
    if "global_batch" in changes and execution.global_batch != batch:
        raise Contradiction(
            f"micro-batch {execution.micro_batch} x accumulation {execution.accumulation} x"
            f" {execution.data_parallel_size} data-parallel ranks is {execution.global_batch}, not"
            f" the global batch of {batch}."
        )
    if execution.global_batch != kept.execution.global_batch and not allow_global_batch:
        raise Contradiction(
            f"this changes the global batch from {kept.execution.global_batch} to"
            f" {execution.global_batch}.",
            "Allow it with --allow-global-batch: the training is then another one.",
        )
    return replace(setup, execution=execution)


def _at_global_batch(e: Execution, batch: int, given: dict[str, Value], allowed: bool) -> Execution:
    if "accumulation" in given and "micro_batch" in given:
        return e  # the caller compares
    ranks = e.data_parallel_size
    share, rest = divmod(batch, ranks)
    whole = f"a global batch of {batch}" + (
        f" over {ranks} data-parallel ranks" if ranks > 1 else ""
    )
    if rest:
        reason = f"a global batch of {batch} cannot be divided over {ranks} data-parallel ranks."
    elif "accumulation" in given:
        if share % e.accumulation == 0:
            return replace(e, micro_batch=share // e.accumulation)
        reason = (
            f"{whole} is {share} samples a rank, which accumulation {e.accumulation} does not"
            " divide."
        )
    elif share % e.micro_batch == 0:
        return replace(e, accumulation=share // e.micro_batch)
    elif "micro_batch" in given:
        reason = (
            f"{whole} is {share} samples a rank, which a micro-batch of {e.micro_batch} does not"
            " divide."
        )
        e = replace(e, accumulation=max(1, share // e.micro_batch))
    else:
        micro_batch = max(
            size for size in range(1, min(e.micro_batch, share) + 1) if share % size == 0
        )
        return replace(e, micro_batch=micro_batch, accumulation=share // micro_batch)
    if not allowed:
        raise Contradiction(
            reason, "Choose numbers that divide it, or allow another with --allow-global-batch."
        )
    return e


def _built(kind: Any, old: Any, new: dict[str, Any]) -> Any:
    """`replace`, with the types checked: the values come from a user's file."""
    fields = {name: getattr(old, name) for name in kind.__struct_fields__} | new
    plain = msgspec.to_builtins(fields)
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        reason, key = str(error).partition(" - ")[0], str(error).partition("`$.")[2].rstrip("`")
        shown = f"{key} cannot be {new[key]!r}" if key in new else str(error)
        raise TrainpaceError(f"{shown}: {reason[0].lower()}{reason[1:]}.") from None


def words_of(setup: Setup) -> str:
    e, loader = setup.execution, setup.loader
    parts = [
        f"micro-batch {e.micro_batch} x {e.accumulation}"
        + (f" x {e.data_parallel_size}" if e.data_parallel_size > 1 else ""),
        "" if e.world_size == 1 else f"{e.world_size} ranks",
        setup.engine or "",
        "" if e.precision == "fp32" else e.precision,
        f"ZeRO-{e.zero_stage}" if e.zero_stage else "",
        "offload" if e.offload_optimizer or e.offload_parameters else "",
        (
            ""
            if e.activation_checkpointing == "none"
            else f"{e.activation_checkpointing} recomputation"
        ),
        "compile" if e.compile else "",
        "channels_last" if e.channels_last else "",
        f"{loader.workers} workers" if loader.workers != 1 else "1 worker",
        "shards" if loader.shards else "",
        (
            ""
            if setup.threads is None
            else f"{setup.threads} thread{'s' if setup.threads > 1 else ''}"
        ),
        *(f"{key} {value}" for key, value in setup.own_settings.items()),
    ]
    return ", ".join(part for part in parts if part)


class LauncherChoice(NamedTuple):
    """The launcher that the user asked for. `name` is auto, process, torchrun or slurm; the rest is Slurm's."""

    name: str = "auto"
    slurm: SlurmOptions = SlurmOptions()

    def over(self, base: SlurmOptions) -> "LauncherChoice":
        """With a ladder's own Slurm options where the user said nothing else."""
        slurm = replace(
            base,
            partition=self.slurm.partition or base.partition,
            extra=(*base.extra, *self.slurm.extra),
            account=self.slurm.account or base.account,
        )
        return self._replace(slurm=slurm)

    def launcher(self, nnodes: int, nproc_per_node: int) -> Launcher:
        """The launcher of one setup; auto takes the plainest that has so many processes and nodes."""
        name = self.name
        if name == "auto":
            name = "slurm" if nnodes > 1 else "torchrun" if nproc_per_node > 1 else "process"
        if name == "slurm":
            return Slurm(options=self.slurm)
        return Torchrun() if name == "torchrun" else ThisMachine()

    def of(self, execution: Execution) -> Launcher:
        return self.launcher(execution.nnodes, execution.nproc_per_node)

    def check(self, ladder: Ladder) -> None:
        """Raise TrainpaceError before anything starts, where a launcher that a rung may need is missing, or Contradiction
        where options are given for one that none needs."""

        def values(key: str) -> set[int]:  # one that is no number is the rung's own failure later
            named = [
                changes[key]
                for rung in ladder.rungs
                for changes in rung.alternatives()
                if key in changes
            ]
            return {v for v in (getattr(ladder.start.execution, key), *named) if isinstance(v, int)}

        sizes = itertools.product(values("nnodes"), values("nproc_per_node"))
        launchers = {
            launcher.name: launcher for launcher in itertools.starmap(self.launcher, sizes)
        }
        if self.slurm != SlurmOptions() and "slurm" not in launchers:
            raise Contradiction(
                "--partition, --account and --sbatch are Slurm's, and no rung is launched with it.",
                "Add --launcher slurm, or leave them out.",
            )
        for launcher in launchers.values():
            launcher.check()
