"""`plan`: choose changes to a training, order them, and forecast what each one saves.

The starting point is the cluster, the current execution, the job and the data loader. They come
from the request, from settings files and from a recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec.structs import replace

from trainpace.configs import normal
from trainpace.core.errors import Contradiction, TrainpaceError, UnreadableInput
from trainpace.core.execution import EXECUTION_FIELDS, Execution, Precision, optimizer_called
from trainpace.core.hardware import Cluster, Device, find_device
from trainpace.core.intake import read_json, read_text, toml_of
from trainpace.core.records import Record, to_jsonable
from trainpace.core.software import TODAY
from trainpace.core.units import parse_count
from trainpace.forecast import running_software
from trainpace.job import NO_WAIT, DataPath, Schedule, accumulation_for_global_batch, total_steps
from trainpace.plan import Plan, Problem, SearchSpace, data_paths, plan_changes
from trainpace.verbs.data import loader_file
from trainpace.verbs.match import Placed, placed
from trainpace.verbs.places import (
    HardwareFile,
    HostName,
    JournalPlace,
    consulted_journal,
    known_of,
    named_host,
    own_devices,
)
from trainpace.verbs.request import (
    ABOVE_0,
    AT_LEAST_1,
    COUNT,
    DEVICES,
    EXISTING_FILE,
    USD,
    Field,
    Misuse,
    Progress,
    Unit,
    fields_of,
    within,
)
from trainpace.verbs.settings import SettingsSource, kinds_of, limits_of, texts_of
from trainpace.verbs.traced import (
    Evidence,
    HostWork,
    adaptation_of,
    caveats,
    evidence_for,
    evidence_json,
    host_work_of,
    recorded_samples,
    recorded_settings,
    recording_of,
    workload_of,
)
from trainpace.verbs.training import (
    AUTOCAST,
    LENGTH,
    USUAL_BATCH,
    GlobalBatch,
    Network,
    Tokens,
    TrainingRequest,
    assumed_setup,
    batch_dividing,
    cluster_with,
    default_precision,
    default_precisions,
    default_setup,
    epoch_of,
    execution_values,
    software_of,
    with_execution,
)
from trainpace.workload import Form, ModelSpec, Variant, Workload, form_of, stored_precision

if TYPE_CHECKING:
    from trainpace.diagnose import Advice
    from trainpace.forecast import Nearness
    from trainpace.watch import Rank, Recording

MOST_SAMPLES = 1e12
ALL_OFFLINE = (
    "this assumes that a sample's whole preparation gives the same in every epoch; trainpace loader"
    " checks that (--offline-share, or --loader)"
)
NONE_OFFLINE = (
    "no part of a sample's preparation can be done offline, because it draws random numbers"
    " (--offline-share, or --loader)"
)
PLANNED_CAUSES = ("data", "launch", "communication", "straggler")
"""Causes in a diagnosis that the search covers itself, or that no setting changes."""
REPLACES_FILES = frozenset({"activation_checkpointing", "offload_optimizer", "offload_parameters"})
"""Fields of `Execution` for which the request may override the files."""
ENGINE_FILES = frozenset(("DeepSpeed", "accelerate"))
"""Kinds of new files that set more than the number of processes."""
CLUSTER_KEYS = ("gpu", "num_gpus", "nodes", "network_gb_per_s", "host", "price")
"""Keys of a cluster file."""
EXECUTION_NOW = (
    *("batch", "accumulate", "precision", "zero", "tp", "pp", "cp"),
    *("checkpointing", "offload", "compile", "channels_last"),
)
"""Options that describe the current training."""
NO_LOADER = (
    "The loader needs the number of its `workers` now, its `cores` per node, and `sample_ms`,"
    " `loader`, or a recording with a loader."
)
WORKERS = "workers|config|command|watched"
"""Options that give the number of loader workers."""

if TYPE_CHECKING:

    class RequestNow(TrainingRequest):
        def __getattr__(self, name: str) -> Any: ...

else:
    RequestNow = with_execution("RequestNow", EXECUTION_NOW, now=True)


class PlanRequest(RequestNow):
    """Request to plan changes to a training.

    Options describe the cluster, the current setup, and the limits of the search.
    """

    groups = (
        "GPUs: gpu num_gpus nodes network cluster; "
        "Training length: price; "
        "How it trains now: config command watched accumulate precision compile tp pp zero"
        " checkpointing; "
        "Goal and limits: allow_global_batch allow_fp8 keep fastest"
    )

    gpu: Annotated[str | None, Field("GPU of the cluster, by name.")] = None
    num_gpus: Annotated[int | None, Field("GPUs per node.  [default: 1]", DEVICES)] = None
    nodes: Annotated[int | None, Field("Nodes.  [default: 1]", DEVICES)] = None
    network: Network = None
    host: HostName = None
    cluster: Annotated[
        str | None,
        Field(
            "The cluster from a file: gpu, num_gpus, nodes, network_gb_per_s, host, price.",
            metavar="FILE.toml",
            overrides="gpu",
        ),
    ] = None
    hardware: HardwareFile = None
    price: Annotated[
        float | None, Field("Dollars per GPU and hour.", USD, sets="price_usd_per_device_hour")
    ] = None
    config: Annotated[
        tuple[str, ...],
        Field("A settings file of the training; repeat for several.", metavar="FILE"),
    ] = ()
    command: Annotated[str | None, Field("Its launch command.", metavar="TEXT")] = None
    watched: Annotated[
        str | None, Field("A recording of it (trainpace watch), with its loader.", metavar="FOLDER")
    ] = None
    global_batch: GlobalBatch = None
    gpus_now: Annotated[
        int | None, Field("GPUs per node that it uses now.  [default: all]", DEVICES)
    ] = None
    nodes_now: Annotated[int | None, Field("Nodes that it uses now.  [default: all]", DEVICES)] = (
        None
    )
    workers: Annotated[
        int | None, Field("Loader workers now.", COUNT, needs="sample_ms|loader|watched")
    ] = None
    sample_ms: Annotated[
        float | None,
        Field(
            "Milliseconds that one core takes to prepare a sample (trainpace loader measures it).",
            within("ms", ABOVE_0, 1e9),
            needs=f"cores|watched {WORKERS}",
            excludes="loader",
        ),
    ] = None
    offline_share: Annotated[
        float | None,
        Field(
            "Share of a sample's preparation that is the same in every epoch, from 0 to 1"
            " (trainpace loader reports it).  [default: 1, assumed]",
            within("share", 0, 1),
            needs="sample_ms|watched",
            excludes="loader",
        ),
    ] = None
    loader: Annotated[
        str | None,
        Field(
            "The answer of trainpace loader --json, in place of `sample_ms`, `cores` and"
            " `offline_share`.",
            EXISTING_FILE,
            metavar="FILE.json",
            needs=WORKERS,
        ),
    ] = None
    cores: Annotated[
        int | None,
        Field("Cores per node for its loaders.", AT_LEAST_1, needs="sample_ms|loader|watched"),
    ] = None
    samples: Annotated[int | None, Field("Samples per epoch.", AT_LEAST_1, needs=LENGTH)] = None
    tokens: Tokens = None
    max_steps: Annotated[
        int | None,
        Field("Updates, in place of `epochs` or as their limit.", AT_LEAST_1, overrides="epochs"),
    ] = None
    allow_global_batch: Annotated[bool, Field("Also consider multiples of the global batch.")] = (
        False
    )
    noise_scale: Annotated[
        str | None,
        Field(
            "Count steps to the same loss, by this gradient noise scale (trainpace measure"
            " --noise-scale --output FILE.json, or the ladder.json of trainpace run).",
            Unit("samples", str),
            metavar="SAMPLES|FILE.json",
            needs="allow_global_batch",
        ),
    ] = None
    allow_fp8: Annotated[bool, Field("Also consider FP8.")] = False
    keep: Annotated[
        tuple[str, ...],
        Field(
            "A setting to leave as it is: GPUs, precision, compile, 'micro-batch', ...; repeat for"
            " several.",
            metavar="SETTING",
        ),
    ] = ()
    fastest: Annotated[
        bool,
        Field(
            "Go to the fastest choice, even if a simpler one is as fast within the forecast's"
            " error."
        ),
    ] = False
    journal: JournalPlace = None
    no_journal: Annotated[bool, Field("Ignore measurements in the journal.")] = False
    evidence: Evidence = "nearest"


class Planned(Record):
    """A plan, with the problem that it solves.

    Attributes:
        script_changes: Changes to the script itself, each with the seconds of the job that it
            saves.
        evidence: Public measurements near the final execution of the plan.
    """

    plan: Plan
    setting: Problem
    script_changes: tuple[tuple[Advice, float], ...]
    evidence: tuple[Nearness, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return what `trainpace plan --json` prints, without the files from `--write`."""
        return {
            **to_jsonable(self.plan),
            "noise_scale": self.setting.noise_scale,
            "saved_s": self.plan.saved_s,
            "in_the_script": [
                {**to_jsonable(advice), "saved_s": saved_s}
                for advice, saved_s in self.script_changes
            ],
            "evidence": evidence_json(self.evidence),
        }


def run(
    request: PlanRequest, progress: Progress, write: bool = False, new: Sequence[str] = ()
) -> Planned:
    """Plan the changes to a training.

    Args:
        request: The training, the cluster and the limits of the search.
        progress: Receives notes and progress.
        write: True if the request's files and the `new` ones will be written. The plan is then
            limited to changes that they can express.
        new: Names of settings files to create.
    """
    r, present = request, _checked(request)
    for text in present.files.unread_notes:
        progress.note(text)
    problem, start, setup = _problem(r, present, progress)
    problem, paths, included = _with_host_work(r, present, problem, start)
    space, paths = _choices(r, paths, start, kinds_of(new) if write else {}, write, progress)
    cluster, workload = problem.cluster, problem.workload
    runs = running_software(workload, problem.software, cluster.device, start.precision)
    for text in runs.idle:
        progress.note(f"note: without effect: {text}")
    names = ({cluster.device.name}, {workload.model})
    with consulted_journal(r.journal, r.no_journal, *names) as journal:
        length = present.pick("sequence_length", r.sequence_length)
        knowledge = known_of(workload, journal, length, r.image_size)
        problem = problem._replace(knowledge=knowledge)
        with progress.work("comparing configurations"):
            plan = plan_changes(problem, start, paths, space, to="fastest" if r.fastest else "best")
        here = problem.on_part(cluster.nodes, cluster.devices_per_node)
        corrected = "" if knowledge is None else knowledge.in_words(here)
    recorded = caveats(present.recording) if present.recording else ()
    end = plan.start if plan.best is None else plan.end
    return Planned(
        plan=replace(
            plan,
            model=r.model_name,
            assumed=(*plan.assumed, *included, *_assumed(r, present, problem, runs.words), *setup),
            corrected=corrected,
            cautions=(*plan.cautions, *_offline_caution(r, plan), *recorded),
            time_limit_s=present.files.value("time_limit_s"),
            in_code=is_in_code(r, present, new, workload),
        ),
        setting=problem,
        script_changes=tuple(script_changes(present, start, problem.schedule)),
        evidence=evidence_for(r.evidence, [(workload, end, cluster.device)]),
    )


def _offline_caution(r: PlanRequest, plan: Plan) -> Iterator[str]:
    is_known = r.offline_share is not None or r.loader is not None
    if plan.best is not None and plan.best.choice.data.precomputed and not is_known:
        yield ALL_OFFLINE


def _assumed(r: PlanRequest, present: Present, problem: Problem, software: str) -> Iterator[str]:
    if r.loader is None and _offline_share(r, present.rank) != r.offline_share:
        yield NONE_OFFLINE
    if problem.software != TODAY or ", " in software:
        yield software


def _checked(r: PlanRequest) -> Present:
    """Read the current setup, and reject bad requests before anything is traced."""
    if isinstance(r.model, str) and Path(r.model).is_dir():
        raise Misuse(
            f"{r.model} is a folder.", "Give the model, and a recording's folder with `watched`."
        )
    present = Present.read(r)
    noise_scale_of(r)
    check_length(r, present)
    return present


def _problem(
    r: PlanRequest, present: Present, progress: Progress
) -> tuple[Problem, Execution, tuple[str, ...]]:
    """Trace the model. Returns the problem, the current execution, and what it assumes."""
    cluster = cluster_of(r, present)
    precision = present.precision(r, cluster.device)
    forms: tuple[Form, ...] = ("half",) if form_of(precision) == "half" else ("fp32", "amp")
    if r.allow_fp8 and "half" not in forms:
        forms = (*forms, "half")
    optimizer = present.pick("optimizer", r.optimizer)
    name = optimizer_called(optimizer) if optimizer else None
    length = present.pick("sequence_length", r.sequence_length)
    variant = Variant(name, length, r.image_size, adaptation=adaptation_of(r))
    workload = workload_of(replace(r, optimizer=optimizer), progress, forms, variant)
    kernels = ("attention", "optimizer_implementation", "cross_entropy")
    files = {name: present.pick(name, getattr(r, name)) for name in kernels}
    problem = Problem(
        workload,
        cluster,
        schedule_of(r, present, workload),
        noise_scale=noise_scale_of(r),
        conditions=r.conditions(),
        software=software_of(replace(r, **files)),
    )
    usual = start = present.execution(r, cluster, workload)
    opens_batch = present.leaves_batch_open(r, workload)
    if opens_batch:
        is_open = present.leaves_open("activation_checkpointing", r.checkpointing, workload)
        is_global = present.pick("global_batch", r.global_batch) is not None
        here = problem.on_part(start.nnodes, start.nproc_per_node)
        start = default_setup(here, start, is_open, is_global)
    is_autocast = present.pick("precision", r.precision) is None and start.precision in AUTOCAST
    setup = assumed_setup(
        is_autocast and len(default_precisions(workload)) > 1,
        opens_batch and start.micro_batch < USUAL_BATCH,
        start.activation_checkpointing != usual.activation_checkpointing,
    )
    return problem, start, setup


def _choices(
    r: PlanRequest,
    paths: tuple[DataPath, ...],
    start: Execution,
    new: Mapping[str, str],
    write: bool,
    progress: Progress,
) -> tuple[SearchSpace, tuple[DataPath, ...]]:
    """Return the search space and the data paths that the settings files allow."""
    limits, fixed_workers = limits_of(texts_of(r), new, start, write)
    space = SearchSpace(
        keep=r.keep, allow_global_batch=r.allow_global_batch, allow_fp8=r.allow_fp8, limits=limits
    )
    if fixed_workers and any(path.workers != paths[0].workers for path in paths):
        progress.note(f"note: the number of loader workers stays: {fixed_workers}")
        paths = tuple(path for path in paths if path.workers == paths[0].workers)
    return space, paths


def is_in_code(
    request: PlanRequest, present: Present, new: Sequence[str], workload: Workload
) -> bool:
    """Return True if the changes must be made in the training's own code.

    That is the case if no settings file or Trainer flag sets the batch, and the model does not come
    from a Trainer or a Transformers configuration.
    """
    if request.config or not ENGINE_FILES.isdisjoint(kinds_of(new).values()):
        return False
    if "accumulation" in workload.settings:  # Set by a task's own Trainer.
        return False
    is_configuration = ModelSpec.of(request.model_name).kind == "transformers"
    return present.files.value("micro_batch") is None and not is_configuration


class Present(NamedTuple):
    """Current setup according to files and a recording. The request must not contradict it."""

    files: SettingsSource
    recording: Recording | None

    @classmethod
    def read(cls, request: PlanRequest) -> Present:
        recording = recording_of(request.model)
        if request.watched:
            from trainpace.watch import read_recording

            recording = read_recording(Path(request.watched))
            if not recording.ranks:
                raise UnreadableInput(f"{request.watched} has no training steps: {recording.seen}")
        return cls(SettingsSource.read(request.config, request.command), recording)

    @property
    def rank(self) -> Rank | None:
        """First process of the recording."""
        return None if self.recording is None else self.recording.ranks[0]

    @property
    def recorded(self) -> dict[str, Any]:
        """Recorded fields of the current execution."""
        return {} if self.rank is None else recorded_settings(self.rank)

    def pick(self, name: str, value: Any, recorded: Any = None) -> Any:
        """Return the request's value, or else the one in the files, or else the recorded one."""
        value = self.files.pick(name, value)
        return recorded if value is None else value

    def leaves_open(self, name: str, value: Any, workload: Workload) -> bool:
        """Return True if neither the request, the files, the recording nor the task set a field."""
        recorded = self.recorded.get(name)
        return (
            value is None and self.pick(name, None, recorded or workload.settings.get(name)) is None
        )

    def leaves_batch_open(self, request: PlanRequest, workload: Workload) -> bool:
        total = self.pick("global_batch", request.global_batch)
        is_divided = self.pick("accumulation", request.accumulate) is not None
        is_open = self.leaves_open("micro_batch", request.batch, workload)
        return is_open and (total is None or not is_divided)

    def execution(self, request: PlanRequest, cluster: Cluster, workload: Workload) -> Execution:
        """Return the current execution.

        Raises:
            Contradiction: The numbers disagree, or need more devices than the cluster has.
        """
        nodes, processes = self._size(request, cluster)
        values = self._values(request, workload, cluster.device)
        accumulation = values.pop("accumulation", None)
        start = Execution(
            nnodes=nodes, nproc_per_node=processes, optimizer=workload.optimizer, **values
        )
        total = self.pick("global_batch", request.global_batch)
        if total is None:
            return replace(start, accumulation=accumulation or 1)
        ranks = start.data_parallel_size
        if self.leaves_batch_open(request, workload) and total % ranks == 0:
            share = total // ranks
            start = replace(start, micro_batch=batch_dividing(share, start.micro_batch))
        needed = accumulation_for_global_batch(total, start.micro_batch, ranks)
        if accumulation not in (None, needed):
            raise Contradiction(
                f"Global batch {total} is not micro-batch {start.micro_batch} x accumulation"
                f" {accumulation} x data-parallel size {start.data_parallel_size}.",
                "Leave one of them out.",
            )
        return replace(start, accumulation=needed)

    def _size(self, request: PlanRequest, cluster: Cluster) -> tuple[int, int]:
        """Return (nodes, processes per node) of the current training."""
        most = (cluster.nodes, cluster.devices_per_node)
        nodes, processes = self.files.world(request.nodes_now, request.gpus_now)
        if nodes is None and processes is None and self.rank is not None:
            processes = min(self.rank.world_size, most[1])
            nodes = -(-self.rank.world_size // most[1])
        nodes, processes = nodes or most[0], processes or most[1]
        if nodes > most[0] or processes > most[1]:
            raise Contradiction(
                f"It trains on {nodes} x {processes} GPUs (nodes x GPUs per node) now, and the"
                f" cluster has {most[0]} x {most[1]}.",
                "Give the whole cluster with `nodes` and `num_gpus`.",
            )
        return nodes, processes

    def precision(self, request: PlanRequest, device: Device) -> Precision:
        """Return the current precision.

        If a file sets fp32, torch's default still decides about TF32.
        """
        stated: Precision | None = self.pick(
            "precision", request.precision, self.recorded.get("precision")
        )
        if stated == "fp32" and request.precision is None:
            return stored_precision(request.model) or device.torch_precision
        return stated or default_precision(request.model, device)

    def _values(self, request: PlanRequest, workload: Workload, device: Device) -> dict[str, Any]:
        """Return the fields of the current execution that the request, files or recording set."""
        sharded = self.files.value("sharding") == "fsdp"
        values: dict[str, Any] = {"micro_batch": USUAL_BATCH, "zero_stage": 3 if sharded else 0}
        # Defaults from the task's own trainer or loader, as in forecast.
        own: dict[str, Any] = dict(workload.settings)
        values |= {name: own[name] for name in own.keys() & EXECUTION_FIELDS.keys()}
        if self.pick("global_batch", request.global_batch) is not None:
            values.pop("accumulation", None)
        recorded = {name: each for name, each in self.recorded.items() if name not in own}
        for name, value in execution_values(request, workload).items():
            if name in ("nnodes", "nproc_per_node"):  # `nodes` and `num_gpus` describe the cluster.
                continue
            if name in REPLACES_FILES:
                picked = normal(name, self.files.value(name)) if value is None else value
            else:  # An unset flag can still come from the files or the recording.
                picked = self.pick(name, None if value is False else value, recorded.get(name))
            if picked is not None:
                values[name] = picked
        precision, own_precision = (
            self.precision(request, device),
            default_precision(workload, device),
        )
        is_open = self.pick("precision", request.precision, recorded.get("precision")) is None
        if is_open and form_of(own_precision) in workload.forms:
            precision = own_precision
        return values | {"precision": precision}


def cluster_of(request: PlanRequest, present: Present) -> Cluster:
    """Return the cluster from its file or from the request.

    Without sizes, it is the cluster of the current training.
    """
    r = _with_cluster_file(request)
    if not r.gpu:
        raise Misuse("Give the GPU with `gpu`, or a cluster file with `cluster`.")
    nodes, processes = present.files.world(r.nodes_now, r.gpus_now)
    return cluster_with(
        find_device(r.gpu, own_devices(r.hardware)),
        r.num_gpus or processes or 1,
        r.nodes or nodes or 1,
        r.network,
        r.price,
        host=named_host(r.host),
    )


def _with_cluster_file(request: PlanRequest) -> PlanRequest:
    """Return the request with the options in its cluster file."""
    path, values = request.cluster, {}
    if path is None:
        return request
    for key, value in toml_of(read_text(path), path).items():
        if key not in CLUSTER_KEYS:
            raise UnreadableInput(
                f"{path} has an unknown key {key!r}.", f"Known: {', '.join(CLUSTER_KEYS)}."
            )
        name = key.removesuffix("_gb_per_s")
        field = fields_of(PlanRequest)[name]
        try:
            values[name] = field.read(value if field.about.unit else str(value))
        except TrainpaceError as error:
            raise UnreadableInput(f"{key} in {path}: {error.message}", error.hint) from None
        given = getattr(request, name)
        if given not in (None, values[name]):
            raise Contradiction(f"{key} is {value} in {path} and {given} on the command line.")
    return replace(request, **values)


def _with_host_work(
    r: PlanRequest, present: Present, problem: Problem, start: Execution
) -> tuple[Problem, tuple[DataPath, ...], tuple[str, ...]]:
    """Return the problem on the assumed server, the available data paths, and the assumptions.

    Raises:
        Misuse: Numbers for the pipeline model of `loader` are missing.
    """
    work, share, cores = _host_work(r, present, problem.workload, start.micro_batch)
    if work is None:
        if any(given is not None for given in (r.offline_share, r.workers, cores)):
            raise Misuse(NO_LOADER)
        return problem, (NO_WAIT,), ()
    cluster = problem.cluster
    forecaster = problem.on_part(cluster.nodes, cluster.devices_per_node)
    at = placed(work, forecaster, start, problem.schedule, problem.conditions, cores)
    now = present.pick("dataloader_workers", r.workers, work.workers)
    if now is None:
        raise Misuse(NO_LOADER)
    problem = problem._replace(cluster=at.forecaster.target.cluster)
    return problem, loader_paths(work, at, now, share), (work.in_words(at.words, now),)


def loader_paths(
    work: HostWork, at: Placed, now: int, offline_share: float | None
) -> tuple[DataPath, ...]:
    """Return the current data path and the available ones, for `now` loader workers per rank."""
    from trainpace.measure import fewest_workers

    def path(workers: int, online: float = 1.0) -> DataPath:
        return work.on(at.cores, at.points, workers, online)

    if work.cost is None:
        return (path(now),)
    return data_paths(now, path, fewest_workers, work.cost.collate_ms / work.samples, offline_share)


def _offline_share(request: PlanRequest, rank: Rank | None) -> float | None:
    """Return the share of the preparation that can be offline: none of it for random samples."""
    is_random = rank is not None and rank.random_samples
    return 0.0 if is_random and request.offline_share is None else request.offline_share


def _host_work(
    r: PlanRequest, present: Present, workload: Workload, batch: int
) -> tuple[HostWork | None, float | None, int | None]:
    """Return (the host's work, share that can be offline, cores per node). None means unknown."""
    from trainpace.diagnose import HANDOVER_MS, SEND_MS
    from trainpace.measure import LoaderCost

    recording, share, cores = present.recording, _offline_share(r, present.rank), r.cores
    recorded = None if recording is None else host_work_of(recording, workload)
    if r.loader is not None:
        cost, share, measured_cores = loader_file(r.loader)
        cores = cores or measured_cores
    elif r.sample_ms is not None:
        ms = r.sample_ms
        cost = LoaderCost(sample_wall_ms=ms, sample_cpu_ms=ms, collate_ms=0.0, batch_size=batch)
    else:
        return recorded, share, cores
    cost = replace(
        cost, send_ms=cost.send_ms or SEND_MS, handover_ms=cost.handover_ms or HANDOVER_MS
    )
    work = recorded or HostWork(None, 1, None)
    return work._replace(cost=cost, samples=cost.batch_size), share, cores


def noise_scale_of(request: PlanRequest) -> float | None:
    """Return the noise scale in samples.

    The request gives a number, or a file from `trainpace measure` or `trainpace run` (ladder.json).
    """
    given: Any = request.noise_scale
    if given is None:
        return None
    if given.endswith(".json"):
        scales = [
            samples
            for scale in _values_of("noise_scale", read_json(given))
            for samples in _values_of("samples", scale)
        ]
        if not scales:
            raise TrainpaceError(
                f"{given} has no gradient noise scale.",
                "Measure it: trainpace measure --noise-scale.",
            )
        given = scales[-1]
    try:
        return float(within("number of samples", ABOVE_0, MOST_SAMPLES, parse_count).read(given))
    except TrainpaceError as error:
        raise Misuse(f"`noise_scale`: {error.message}", error.hint) from None


def _values_of(key: str, data: Any) -> Iterator[Any]:
    """Yield every value of a key in nested JSON."""
    if isinstance(data, dict):
        if data.get(key) is not None:
            yield data[key]
        data = list(data.values())
    for one in data if isinstance(data, list) else ():
        yield from _values_of(key, one)


def _samples(request: PlanRequest, present: Present, only_batch: int | None = None) -> int | None:
    """Return the samples per epoch from the request, or else from the recording.

    None if the request gives tokens.
    """
    if request.samples is None and request.tokens is None:
        return recorded_samples(present.recording, only_batch)
    return request.samples


def check_length(request: PlanRequest, present: Present) -> None:
    """Raise TrainpaceError if the length of the training is unknown. Savings need a length."""
    epochs = present.pick("epochs", request.epochs)
    if epochs is None and present.pick("max_steps", request.max_steps) is None:
        raise TrainpaceError(
            "The length of the job is unknown.",
            "Add `samples` and `epochs`, or `max_steps` (1000, to see what a thousand steps save).",
        )
    if epochs is not None and request.tokens is None and _samples(request, present) is None:
        raise TrainpaceError(
            "The number of samples per epoch is unknown.", "Add `samples` or `tokens`."
        )


def schedule_of(request: PlanRequest, present: Present, workload: Workload) -> Schedule:
    r, pick = request, present.pick
    return epoch_of(
        _samples(r, present, workload.only_batch),
        r.tokens,
        pick("sequence_length", r.sequence_length),
        workload,
        epochs=pick("epochs", r.epochs),
        max_steps=pick("max_steps", r.max_steps),
        drop_last=bool(pick("drop_last", None)),
    )


def script_changes(
    present: Present, start: Execution, schedule: Schedule
) -> list[tuple[Advice, float]]:
    """Return changes to the script itself, from the recording's diagnosis.

    Each comes with the seconds of the job that it saves.
    """
    if present.recording is None:
        return []
    from trainpace.diagnose import diagnose

    steps = total_steps(schedule, start)
    advice = diagnose(present.recording).advice
    return [(a, steps * a.saves_ms / 1e3) for a in advice if a.cause not in PLANNED_CAUSES]
