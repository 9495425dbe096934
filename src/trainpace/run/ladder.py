"""Ladders: the starting setup of a training, the changes to try in turn, and the launcher."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import Contradiction, TrainpaceError, UnknownName
from trainpace.core.execution import Execution
from trainpace.core.records import Record
from trainpace.job import ASSUMED, JobConditions, Schedule
from trainpace.run.job import UNTRACKED, Launcher, ThisMachine, Torchrun, check_variable
from trainpace.run.slurm import Slurm, SlurmOptions
from trainpace.run.trial import EngineName, LoaderSettings, Trial, engine_for

Value = str | int | bool | float | None
Changes = dict[str, Value | tuple[Value, ...]]

EXECUTION_KEYS = tuple(name for name in Execution.__struct_fields__ if name != "engine")
LOADER_KEYS = LoaderSettings.__struct_fields__
KEYS = (*EXECUTION_KEYS, *LOADER_KEYS, "engine", "threads", "global_batch")
"""Settings that a rung may change.

`engine` is the trial's engine (plain, ddp, ...), not a field of the execution.
"""
_RANKS = {"nnodes", "nproc_per_node"}
_NEEDS_ENGINE = {"zero_stage", "offload_optimizer", "offload_parameters"}
MOST_ALTERNATIVES = 16
"""Maximum number of alternatives of one rung."""
SHARDS = "{shards}"
"""Placeholder in a script's settings for the folder of the shards."""
TRAINPACES_OWN = ("OMP_NUM_THREADS", "PYTHONPATH", *UNTRACKED)
"""Environment variables that a trial of a script sets, besides those that start with TRAINPACE_."""


class Setup(Record):
    """Configuration that one trial measures.

    Attributes:
        engine: Engine of the trial. None selects the usual engine for the execution.
        threads: Threads per process. None gives each rank an even share of the cores.
        settings: Keys in the script's own settings files, with dots between sections. "{shards}" in
            a value stands for the folder of the shards.
        environment: Environment variables of the processes, for example of a memory allocator.
    """

    task: str
    execution: Execution
    engine: EngineName | None = None
    loader: LoaderSettings = LoaderSettings()
    threads: int | None = None
    settings: dict[str, Value] = msgspec.field(default_factory=dict)
    environment: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def opaque_changes(self) -> dict[str, Value]:
        """Settings and environment variables whose effect on a step cannot be forecast.

        Settings that contain the folder of the shards are excluded.
        """
        return {
            key: value for key, value in self.settings.items() if SHARDS not in str(value)
        } | self.environment

    def trial(self, **rest: Any) -> Trial:
        """Return a trial of this setup. `rest` holds more fields of `Trial`, such as its length."""
        return Trial(
            task=self.task,
            execution=self.execution,
            engine=self.engine or engine_for(self.execution),
            loader=self.loader,
            threads_per_process=self.threads,
            **rest,
        )


class Script(Record):
    """Training script that is run unchanged. `command` and `configs` are relative to `folder`."""

    command: str
    configs: tuple[str, ...] = ()
    folder: str = "."


class Rung(Record):
    """Step of a ladder: one change to try.

    Attributes:
        changes: New values of settings. A tuple of values is a choice: all are tried and the best
            is kept. Several tuples are tried in all combinations.
        precompute: Dataset FILE.py:NAME. Its samples are first stored as shards, which then replace
            it.
        settings: As in `Setup`, for a script.
        environment: As in `Setup`, for a script.
    """

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
        if not any((self.changes, self.precompute, self.settings, self.environment)):
            raise TrainpaceError(
                f"the rung {self.title!r} changes nothing.",
                "Name a setting, precompute or environment.",
            )
        for name in self.environment:
            check_variable(name)
            if name in TRAINPACES_OWN or name.startswith("TRAINPACE_"):
                raise TrainpaceError(
                    f"the rung {self.title!r} sets {name}, which Trainpace sets in trials.",
                    "Use threads for OMP_NUM_THREADS; leave the others out.",
                )
        if len(self.alternatives()) > MOST_ALTERNATIVES:
            raise TrainpaceError(
                f"the rung {self.title!r} has {len(self.alternatives())} combinations of values;"
                f" at most {MOST_ALTERNATIVES} are allowed.",
                "Give fewer values, or divide them among several rungs.",
            )

    @property
    def takes_shards(self) -> bool:
        """True if a setting of the script contains the folder of the shards."""
        return any(isinstance(value, str) and SHARDS in value for value in self.settings.values())

    def alternatives(self) -> tuple[dict[str, Value], ...]:
        """Return the changes of each alternative: all combinations of the choices."""
        choices = [v if isinstance(v, tuple) else (v,) for v in self.changes.values()]
        return tuple(
            dict(zip(self.changes, values, strict=True)) for values in itertools.product(*choices)
        )


class Ladder(Record):
    """Starting setup, the rungs to try in turn, and the job that they are for.

    Attributes:
        job: None if the hours and dollars of the whole job are not needed.
        conditions: Work of the job other than steps.
        price_usd_per_hour: Price of one node.
        loss_tolerance: Share of the baseline's first loss (see `results.compare`).
        seconds: Length of a trial after `warmup_steps`, unless `steps` is given.
        seed: Seed of all trials. The second trial of the baseline uses the next seed.
        script: Script to train instead of a task. With a script, the task is the model for
            forecasts.
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
        """Name for messages: the task, or the script's command."""
        return self.start.task if self.script is None else self.script.command

    def __post_init__(self) -> None:
        price = self.price_usd_per_hour
        limits = (
            (self.steps is None or 5 <= self.steps <= 100_000, "steps", "Give 5 or more."),
            (0 < self.seconds < float("inf"), "seconds", "Give a time above 0."),
            (self.warmup_steps >= 1, "warmup_steps", "A trial needs 1 warm-up step or more."),
            (0 < self.loss_tolerance < 10, "loss_tolerance", "It is a share: 0.1 is 10%."),
            (price is None or 0 <= price <= 1e6, "price_usd_per_hour", "Give dollars per hour."),
        )
        for valid, name, hint in limits:
            if not valid:
                raise TrainpaceError(f"{name} cannot be {getattr(self, name)}.", hint)
        for rung in self.rungs:
            self._check_script(rung)

    def _check_script(self, rung: Rung) -> None:
        """Raise TrainpaceError if a rung does not fit the ladder's script or task."""
        shards = rung.precompute or "shards" in rung.changes
        if self.script is None and (rung.settings or rung.environment):
            raise TrainpaceError(
                f"the rung {rung.title!r} has settings or environment variables of a script, but"
                " this ladder trains a task.",
                "Name the script with command and config.",
            )
        if self.script is not None and shards and not rung.takes_shards:
            raise TrainpaceError(
                f"the rung {rung.title!r} does not say which setting of the script names the"
                " shards.",
                'Add settings = {"data.shards" = "{shards}"}, or use a task instead of a command.',
            )
        if rung.takes_shards and not shards:
            raise TrainpaceError(
                f"the rung {rung.title!r} has no shards to name.",
                'Add precompute = "FILE.py:NAME".',
            )


def changed(kept: Setup, changes: dict[str, Value], allow_global_batch: bool = False) -> Setup:
    """Return the setup `kept` with the values in `changes`.

    The global batch stays the same unless another one is allowed. If the number of ranks or the
    micro-batch changes, the accumulation adapts. If that is not enough, the micro-batch becomes the
    largest divisor of a rank's share. Values in `changes` never adapt.

    Raises:
        Contradiction: If no whole numbers give the global batch, or it would change without
            permission.
        TrainpaceError: If a value has the wrong type or is out of range.
    """
    fields = among(changes, EXECUTION_KEYS)
    loader = _built(LoaderSettings, kept.loader, among(changes, LOADER_KEYS))
    # A new number of ranks may not fit the shard size, and may need another engine.
    reset = {"shard_size": None} if fields.keys() & _RANKS else {}
    engine = {"engine": None} if fields.keys() & (_RANKS | _NEEDS_ENGINE) else {}
    setup = _built(Setup, kept, {"loader": loader} | engine | among(changes, ("engine", "threads")))
    old_batch = kept.execution.global_batch
    batch = changes.get("global_batch", old_batch)
    if type(batch) is not int or batch < 1:
        raise TrainpaceError(f"global_batch is {batch}; it must be a whole number from 1.")
    execution = _at_global_batch(
        _built(Execution, kept.execution, reset | fields), batch, fields, allow_global_batch
    )
    if "global_batch" in changes and execution.global_batch != batch:
        raise Contradiction(
            f"micro-batch {execution.micro_batch} x accumulation {execution.accumulation} x"
            f" {execution.data_parallel_size} data-parallel ranks is {execution.global_batch}, not"
            f" the global batch of {batch}."
        )
    if execution.global_batch != old_batch and not allow_global_batch:
        raise Contradiction(
            f"this changes the global batch from {old_batch} to {execution.global_batch}.",
            "Allow it with --allow-global-batch; the training is then a different one.",
        )
    return replace(setup, execution=execution)


def among(changes: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of some keys, as far as they are given."""
    return {key: changes[key] for key in keys if key in changes}


def _at_global_batch(e: Execution, batch: int, given: dict[str, Value], allowed: bool) -> Execution:
    """Return the execution with sizes that give the global batch, without changing `given`."""
    fixed = given.keys() & {"accumulation", "micro_batch"}
    if len(fixed) == 2:
        return e  # The caller checks the global batch.
    share, rest = divmod(batch, e.data_parallel_size)
    if not fixed and not rest:
        e = replace(e, micro_batch=_largest_divisor(share, e.micro_batch))
    name, other = "micro_batch", "accumulation"
    if "accumulation" in fixed:
        name, other = other, name
    size = getattr(e, name)
    if not rest and share % size == 0:
        return replace(e, **{other: share // size})
    if not allowed:
        raise Contradiction(
            f"a global batch of {batch} is {batch / e.data_parallel_size:g} samples per rank, which"
            f" {name} {size} does not divide.",
            "Choose numbers that divide it, or allow another with --allow-global-batch.",
        )
    if rest or other == "micro_batch":
        return e
    return replace(e, accumulation=max(1, share // size))


def _largest_divisor(number: int, most: int) -> int:
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


def _built(kind: Any, old: Any, new: dict[str, Any]) -> Any:
    """Return a record of type `kind` with the fields of `old` and `new`.

    The types are checked, because the values come from a user's file.
    """
    fields = {name: getattr(old, name) for name in kind.__struct_fields__} | new
    plain = msgspec.to_builtins(fields)
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        reason, key = str(error).partition(" - ")[0], str(error).partition("`$.")[2].rstrip("`")
        shown = f"{key} cannot be {new[key]!r}" if key in new else str(error)
        raise TrainpaceError(f"{shown}: {reason[0].lower()}{reason[1:]}.") from None


def words_of(setup: Setup) -> str:
    """Return a short description of a setup, for tables and messages."""
    e, loader, threads = setup.execution, setup.loader, setup.threads
    ranks = f" x {e.data_parallel_size}" if e.data_parallel_size > 1 else ""
    parts = (
        (True, f"micro-batch {e.micro_batch} x {e.accumulation}{ranks}"),
        (e.world_size > 1, f"{e.world_size} ranks"),
        (setup.engine, setup.engine),
        (e.precision != "fp32", e.precision),
        (e.zero_stage, f"ZeRO-{e.zero_stage}"),
        (e.offload_optimizer or e.offload_parameters, "offload"),
        (e.activation_checkpointing != "none", f"{e.activation_checkpointing} recomputation"),
        (e.compile, "compile"),
        (e.channels_last, "channels_last"),
        (True, counted(loader.workers, "worker")),
        (loader.shards, "shards"),
        (threads is not None, counted(threads or 0, "thread")),
        *((True, f"{key} {value}") for key, value in setup.opaque_changes.items()),
    )
    return ", ".join(str(words) for applies, words in parts if applies)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 worker" or "2 workers"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


class LauncherChoice(NamedTuple):
    """Launcher that the user chose (auto, process, torchrun or slurm), with options for Slurm."""

    name: str = "auto"
    slurm: SlurmOptions = SlurmOptions()

    def over(self, base: SlurmOptions) -> "LauncherChoice":
        """Return this choice with the ladder's Slurm options added. The user's own options win."""
        slurm = replace(
            base,
            partition=self.slurm.partition or base.partition,
            extra=(*base.extra, *self.slurm.extra),
            account=self.slurm.account or base.account,
        )
        return self._replace(slurm=slurm)

    def launcher(self, nnodes: int, nproc_per_node: int) -> Launcher:
        """Return the launcher for a number of nodes and processes per node.

        "auto" selects Slurm for several nodes, torchrun for several processes, else a plain
        process.
        """
        name = self.name
        if name == "auto":
            name = "slurm" if nnodes > 1 else "torchrun" if nproc_per_node > 1 else "process"
        if name == "slurm":
            return Slurm(options=self.slurm)
        return Torchrun() if name == "torchrun" else ThisMachine()

    def of(self, execution: Execution) -> Launcher:
        """Return the launcher for an execution."""
        return self.launcher(execution.nnodes, execution.nproc_per_node)

    def check(self, ladder: Ladder) -> None:
        """Check the launchers of all rungs before any trial starts.

        Raises:
            TrainpaceError: If a launcher is not installed.
            Contradiction: If Slurm options are given, but no rung uses Slurm.
        """

        # A value that is not a number raises an error later, with its rung.
        def values(key: str) -> set[int]:
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
                (
                    "--partition, --account and --sbatch need Slurm, but no rung is launched "
                    "with it."
                ),
                "Add --launcher slurm, or leave them out.",
            )
        for launcher in launchers.values():
            launcher.check()
