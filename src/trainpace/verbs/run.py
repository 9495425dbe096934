"""`run`: try changes one after another with short trainings, and keep those that help.

The changes come from a ladder or a plan. Each change is a rung, which may have several
alternatives. A trial is one short training, and an attempt is an alternative with its result.
"""

import contextlib
import fcntl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec.structs import replace

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.hardware import HostLinks
from trainpace.core.host import usable_cores
from trainpace.core.records import cannot_write_into, load, make_folder, save
from trainpace.job import total_steps
from trainpace.journal import Journal, anonymous_entry, signed
from trainpace.measure import detect, device_in
from trainpace.run import (
    NO_FORECAST,
    NO_MODEL,
    Attempt,
    ClimbActions,
    FailedTrial,
    Ladder,
    LadderForecasts,
    LadderResult,
    LauncherChoice,
    MeasuredCompute,
    RungPreview,
    Script,
    Setup,
    Slurm,
    SlurmOptions,
    StepForecast,
    TrialResult,
    climb,
    entry_of_trial,
    job_of,
    keep_files,
    make_shards,
    noise_scale_of,
    prepare,
    preview,
    read_ladder,
    run_script,
    run_trial,
    rung_file_name,
    script_job,
    started_by,
    why_no_noise_scale,
)
from trainpace.verbs.places import (
    JournalPlace,
    KeepIdentity,
    device_of,
    opened_journal,
    profile_here,
    profile_or_brief,
)
from trainpace.verbs.request import ABOVE_0_S, COUNT, USD, Argument, Field, Progress, Request, Work
from trainpace.verbs.settings import SettingsSource
from trainpace.workload import ModelSpec

STATE = "ladder.json"


class RunRequest(Request):
    """Request to try the changes of a ladder or a plan with real steps."""

    groups = (
        "Model: task command config; "
        "GPUs: launcher device; "
        "Goal and limits: out seconds steps price stop_early fresh"
    )

    ladder: Annotated[
        str, Argument("A ladder.toml, or a plan from trainpace plan --output.", metavar="LADDER")
    ]
    task: Annotated[
        str | None,
        Field("FILE.py:FUNCTION or a model, in place of the one in the file.", metavar="SPEC"),
    ] = None
    command: Annotated[
        str | None,
        Field("Launch command of an unchanged script to run instead of a task.", metavar="TEXT"),
    ] = None
    config: Annotated[
        tuple[str, ...],
        Field(
            "A settings file that the script reads; repeat for several.",
            metavar="FILE",
            needs="command",
        ),
    ] = ()
    precompute: Annotated[
        str, Field("Dataset to make a plan's shards from.", metavar="FILE.py:NAME")
    ] = ""
    out: Annotated[
        str | None,
        Field("Folder for state, logs and shards.  [default: NAME-run]", metavar="FOLDER"),
    ] = None
    launcher: Annotated[
        Literal["auto", "process", "torchrun", "slurm"],
        Field("auto: one process, torchrun for several, Slurm for several nodes."),
    ] = "auto"
    partition: Annotated[str | None, Field("Slurm partition.", metavar="NAME")] = None
    account: Annotated[str | None, Field("Slurm account.", metavar="NAME")] = None
    sbatch: Annotated[
        tuple[str, ...], Field("Another option for sbatch: --sbatch=--qos=debug.", metavar="TEXT")
    ] = ()
    device: Annotated[
        str | None,
        Field("Device to train on, as in measure.  [default: the file's]", metavar="KIND"),
    ] = None
    seconds: Annotated[
        float | None, Field("Training time of a trial.  [default: the file's, or 8s]", ABOVE_0_S)
    ] = None
    steps: Annotated[
        int | None,
        Field("Steps of a trial, in place of `seconds`.  [default for a script: 30]", COUNT),
    ] = None
    timeout: Annotated[
        float, Field("Time limit of a trial, after which its change is undone.", ABOVE_0_S)
    ] = 600.0
    price: Annotated[
        float | None, Field("Dollars per node and hour.  [default: the file's]", USD)
    ] = None
    allow_global_batch: Annotated[
        bool, Field("Allow rungs to change the global batch, which changes the training.")
    ] = False
    stop_early: Annotated[bool, Field("Stop after the first rung that does not help.")] = False
    no_forecast: Annotated[
        bool,
        Field("Skip the forecasts. The machine, the model and the samples are not examined then."),
    ] = False
    fresh: Annotated[bool, Field("Start again instead of resuming an earlier run.")] = False
    journal: JournalPlace = None
    no_journal: Annotated[bool, Field("Save nothing in the journal.")] = False
    keep_identity: KeepIdentity = False

    @property
    def launchers(self) -> LauncherChoice:
        slurm = SlurmOptions(partition=self.partition, account=self.account, extra=self.sbatch)
        return LauncherChoice(self.launcher, slurm)

    @property
    def folder(self) -> Path:
        return Path(self.out or f"{Path(self.ladder).stem}-run")


def run(request: RunRequest, progress: Progress) -> LadderResult:
    """Try the changes in order.

    Measurements are saved at once in the request's folder. A later call resumes from there.
    """
    ladder = _ladder(request)
    _tell_unread(ladder, progress)
    request.launchers.check(ladder)
    folder = request.folder
    make_folder(folder)
    with (
        _locked(folder),
        opened_journal(request.journal, request.no_journal) as journal,
        progress.work(f"running {Path(request.ladder).name}") as work,
    ):
        before = _earlier_result(folder, request)
        actions = _actions(ladder, request, journal, before, progress, work)
        try:
            climbed = climb(ladder, actions, before, request.stop_early)
        except KeyboardInterrupt:
            work.say(
                f"the measured rungs are saved in {folder / STATE}; the same command continues"
                " from there"
            )
            raise
        if ladder.script is not None:
            files = keep_files(ladder, climbed.kept[0], folder)
            work.say(f"the resulting settings files: {files}")
    return climbed


def dry_run(request: RunRequest, progress: Progress) -> tuple[list[RungPreview], list[list[str]]]:
    """Return the setups, forecasts and commands of all rungs without training."""
    ladder, folder = _ladder(request), request.folder
    _tell_unread(ladder, progress)
    make_folder(folder)
    with _locked(folder), progress.work(f"running {Path(request.ladder).name}") as work:
        previews = preview(ladder, _actions(ladder, request, None, None, progress, work))
        return previews, [_commands(rung, ladder, request) for rung in previews]


def _ladder(request: RunRequest) -> Ladder:
    """Return the ladder of the request's changes.

    Raises:
        TrainpaceError: The ladder would fail for a reason that is known before anything starts.
    """
    script = (
        None if request.command is None else Script(command=request.command, configs=request.config)
    )
    ladder = read_ladder(Path(request.ladder), request.task, request.precompute, script)
    given = {name: getattr(request, name) for name in ("device", "seconds", "steps")}
    given["price_usd_per_hour"] = request.price
    changes = {name: value for name, value in given.items() if value is not None}
    ladder = replace(
        ladder,
        allow_global_batch=ladder.allow_global_batch or request.allow_global_batch,
        **changes,
    )
    if ladder.job is not None:  # Raises TrainpaceError if the job has no length.
        total_steps(ladder.job, ladder.start.execution)
    if ladder.script is not None and request.launcher in ("process", "torchrun"):
        raise Contradiction(
            "a script is started by its own command, here or on Slurm's nodes.",
            "Leave `launcher` out, or give slurm to run every rung there.",
        )
    return ladder


def _tell_unread(ladder: Ladder, progress: Progress) -> None:
    """Show which settings in the Python files of a script could not be read."""
    script = ladder.script
    if script is not None:
        files = tuple(str(Path(script.folder, file)) for file in script.configs)
        for text in SettingsSource.read(files, None).unread_notes:
            progress.note(text)


def _earlier_result(folder: Path, request: RunRequest) -> LadderResult | None:
    """Return the saved result of an earlier run in the folder, or None to start from scratch."""
    if request.fresh or not (folder / STATE).exists():
        return None
    try:
        return load(folder / STATE, LadderResult)
    except TrainpaceError as error:
        raise TrainpaceError(
            error.message, "Start over with `fresh`, or choose another folder with `out`."
        ) from None


def _actions(
    ladder: Ladder,
    request: RunRequest,
    journal: Journal | None,
    before: LadderResult | None,
    progress: Progress,
    work: Work,
) -> ClimbActions:
    folder = request.folder

    def links() -> HostLinks | None:
        profile = profile_here(progress)
        return None if profile is None else profile.host_links

    # Number of trials. The baseline has two, to learn the spread of its loss.
    expected = 2 + sum(len(rung.alternatives()) for rung in ladder.rungs)
    done_before = 0 if before is None else 2 + sum(len(result.tried) for result in before.rungs)
    done = done_before
    # The noise scale is measured only once.
    has_noise_scale = before is not None and noise_scale_of(before) is not None
    forecasts = LadderForecasts(
        folder,
        ladder.device,
        lambda: profile_or_brief(progress),
        work.say,
        request.timeout,
        ladder.seed,
        links,
    )

    def try_it(setup: Setup, seed: int, name: str) -> TrialResult | FailedTrial:
        nonlocal done, has_noise_scale
        # Trials whose results are too close to call are repeated, so there can be more than
        # expected.
        work.to(done, max(expected, done + 1), name, done - done_before)
        done += 1
        try:
            launcher = request.launchers.over(ladder.slurm).of(setup.execution)
            if ladder.script is not None:
                script_trial, _ = prepare(ladder, setup, folder / "trials" / name)
                slurm = launcher if isinstance(launcher, Slurm) else None
                return run_script(script_trial, folder / "trials" / name, request.timeout, slurm)
            trial = _trial(ladder, setup, seed)
            gather = (
                not has_noise_scale
                and ModelSpec.of(setup.task).runs_code
                and not why_no_noise_scale(trial.engine, setup.execution)
            )
            outcome = run_trial(
                replace(trial, noise_scale=gather),
                launcher,
                folder / "trials" / name,
                request.timeout,
            )
            if isinstance(outcome, TrialResult) and outcome.noise_scale:
                has_noise_scale = True
            return outcome
        except TrainpaceError as error:
            return FailedTrial(kind="misuse", reason=str(error))

    def forecast(
        setups: Sequence[Setup], measured: Sequence[MeasuredCompute]
    ) -> list[StepForecast]:
        if request.no_forecast:
            return [StepForecast(reason=NO_FORECAST) for _ in setups]
        if not ladder.start.task:
            return [StepForecast(reason=NO_MODEL) for _ in setups]
        return forecasts.forecast(setups, measured)

    return ClimbActions(
        try_it=try_it,
        forecast=forecast,
        tell=work.say,
        precompute=lambda spec: make_shards(spec, folder, usable_cores(), work.say),
        keep=lambda climbed: save(climbed, folder / STATE),
        journal=_journal_writer(ladder, request, journal),
    )


def _trial(ladder: Ladder, setup: Setup, seed: int) -> Any:
    return setup.trial(
        device=ladder.device,
        seconds=ladder.seconds,
        steps=ladder.steps,
        warmup_steps=ladder.warmup_steps,
        seed=seed,
    )


def _commands(rung: RungPreview, ladder: Ladder, request: RunRequest) -> list[str]:
    """Return the commands of a rung. For a script, also return the changes to its settings files.

    Also writes the request files that the commands refer to, so that a user can run them by hand.
    """
    commands = []
    for i, attempt in enumerate(rung.attempts):
        setup = attempt.setup
        if not attempt.failure:
            # The forecast or the trial reports the same error.
            with contextlib.suppress(TrainpaceError):
                folder = request.folder / "dry-run" / rung_file_name(rung.title, i)
                launcher = request.launchers.over(ladder.slurm).of(setup.execution)
                if ladder.script is not None:
                    trial, files = prepare(ladder, setup, folder)
                    on_slurm = isinstance(launcher, Slurm)
                    text = (
                        launcher.text(script_job(trial, folder, request.timeout))
                        if on_slurm
                        else started_by(trial)
                    )
                    commands.append("\n".join([text, *(file.diff for file in files if file.diff)]))
                    continue
                job = job_of(_trial(ladder, setup, ladder.seed), folder, request.timeout)
                commands.append(launcher.text(job))
    return commands


def _journal_writer(
    ladder: Ladder, request: RunRequest, journal: Journal | None
) -> Callable[[Attempt], None]:
    """Return a function that adds an attempt to the journal, if there is one."""
    if journal is None:
        return lambda _: None
    device = _assumed_device(ladder, request)

    def write(one: Attempt) -> None:
        nonlocal device  # A failed trial gets the device of the latest successful one.
        device = (device_in(one.measured.environment) if one.measured is not None else "") or device
        entry = entry_of_trial(one, device, ladder.seed, ladder.name)
        journal.add(
            signed(
                entry if request.keep_identity else anonymous_entry(entry), request.keep_identity
            )
        )

    return write


def _assumed_device(ladder: Ladder, request: RunRequest) -> str:
    """Return the name of the device until a trial has reported it."""
    if request.launchers.of(ladder.start.execution).name != "slurm":
        return device_of(ladder.device, detect())
    return "NVIDIA GPU" if ladder.device == "cuda" else ladder.device.upper()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder, because two runs in it would overwrite each other's state.

    The operating system releases the lock when the process ends.
    """
    try:
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise cannot_write_into(folder, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainpaceError(
                f"Another trainpace run is working in {folder}.",
                "Wait for it, or name another folder with `out`.",
            ) from None
        except OSError:  # The file system does not support locks.
            pass
        yield
