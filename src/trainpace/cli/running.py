"""What `trainpace run` does: the ladder, this machine, trials by a launcher, the state on disk, the journal, the report."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainpace.cli.launchers import LauncherChoice
from trainpace.cli.machine import device_of, profile_here, profile_or_brief
from trainpace.cli.pictures import save_pictures
from trainpace.errors import Contradiction, TrainpaceError
from trainpace.hardware.cluster import HostLinks
from trainpace.journal import Entry, Journal, anonymous_entry, new_id, now_utc, printable
from trainpace.ladder.climb import Ahead, Means, climb, file_name, preview
from trainpace.ladder.climbed import Climbed, Tried, noise_scale_of
from trainpace.ladder.foresee import Foreseen, Known
from trainpace.ladder.inputs import SCRIPT_STEPS, read_ladder
from trainpace.ladder.rungs import Ladder, Script, Setup, words_of
from trainpace.ladder.script import keep_files, prepare, started_by, try_script
from trainpace.ladder.sights import Sights, has_data
from trainpace.launch.engines.rules import why_no_noise_scale
from trainpace.launch.slurm_script import SlurmOptions
from trainpace.launch.trial import FailedTrial, TrialResult
from trainpace.launch.trials import job_of, run_trial
from trainpace.machine.detect import detect
from trainpace.machine.environment import device_in
from trainpace.process import usable_cores
from trainpace.records import cannot_write_into, load, make_folder, save, write_whole
from trainpace.report.ladder import ahead_json, ladder_json, markdown, print_ahead, print_ladder, table_of
from trainpace.report.progress import Bar
from trainpace.schedule import total_steps

STATE = "ladder.json"
TryIt = Callable[[Setup, int, str], TrialResult | FailedTrial]
_OUTCOMES = {"out of memory": "out_of_memory", "timed out": "timeout"}


class Options(NamedTuple):
    """The command's."""

    task: str | None
    command: str | None
    configs: tuple[str, ...]
    precompute: str
    folder: str | None
    launcher: str
    partition: str | None
    account: str | None
    sbatch: tuple[str, ...]
    device: str | None
    seconds: float | None
    steps: int | None
    timeout: float
    price: float | None
    allow_global_batch: bool
    stop_early: bool
    dry_run: bool
    no_forecast: bool
    fresh: bool
    place: str | None
    no_journal: bool
    keep_identity: bool
    markdown: str | None
    page: str | None
    figure: str | None
    as_json: bool

    @property
    def choice(self) -> LauncherChoice:
        """Of launchers."""
        return LauncherChoice(
            self.launcher, SlurmOptions(partition=self.partition, account=self.account, extra=self.sbatch)
        )


def run_ladder(path: Path, o: Options) -> tuple[dict[str, Any], int]:
    """(the answer as JSON, exit code)."""
    given = None if o.command is None else Script(command=o.command, configs=o.configs)
    ladder = _with_options(read_ladder(path, o.task, o.precompute, given), o)
    if ladder.job is not None:
        total_steps(ladder.job, ladder.start.execution)  # which says what is missing before anything starts
    if ladder.script is not None:
        _check_script(o)
    elif not o.dry_run:
        o.choice.check(ladder)
    folder = folder_of(path, o)
    make_folder(folder)
    with _alone(folder), _journal(o) as journal, Bar(f"running {path.name}") as bar:
        before = None if o.dry_run else _before(folder, o)
        means = _means(ladder, folder, o, journal, before, bar.say)
        if o.dry_run:
            return _dry_run(ladder, means, folder, o), 0
        try:
            climbed = climb(
                ladder, means._replace(try_it=_counted(means.try_it, ladder, before, bar)), before, o.stop_early
            )
        except KeyboardInterrupt:
            bar.say(f"the rungs measured so far are kept in {folder / STATE}; the same command goes on from there")
            raise
        if ladder.script is not None:
            kept = keep_files(ladder.script, ladder.start, climbed.kept[0], folder)
            bar.say(f"the settings files as they are kept: {kept}")
    return _report(climbed, o)


def folder_of(path: Path, o: Options) -> Path:
    """Where the state and the logs of this ladder go."""
    return Path(o.folder or f"{path.stem}-run")


def _check_script(o: Options) -> None:
    if o.launcher != "auto" or o.choice.slurm != SlurmOptions():
        raise Contradiction(
            "a script is started by its own command, not by --launcher or Slurm's options.", "Leave them out."
        )


def _with_options(ladder: Ladder, o: Options) -> Ladder:
    given = {"device": o.device, "seconds": o.seconds, "steps": o.steps, "price_usd_per_hour": o.price}
    changes = {key: value for key, value in given.items() if value is not None}
    return replace(ladder, allow_global_batch=ladder.allow_global_batch or o.allow_global_batch, **changes)


def _before(folder: Path, o: Options) -> Climbed | None:
    if o.fresh or not (folder / STATE).exists():
        return None
    try:
        return load(folder / STATE, Climbed)
    except TrainpaceError as error:
        raise TrainpaceError(error.message, "Begin anew with --fresh, or name another --out.") from None


def _counted(try_it: TryIt, ladder: Ladder, before: Climbed | None, bar: Bar) -> TryIt:
    """The same, and `bar` shows how many trials are left, unless two are too close and are tried again."""
    expected = 2 + sum(len(rung.alternatives()) for rung in ladder.rungs)
    there = 0 if before is None else 2 + sum(len(result.tried) for result in before.rungs)
    done = there

    def counted(setup: Setup, seed: int, name: str) -> TrialResult | FailedTrial:
        nonlocal done
        bar.to(done, max(expected, done + 1), name, done - there)
        outcome = try_it(setup, seed, name)
        done += 1
        return outcome

    return counted


def _means(
    ladder: Ladder,
    folder: Path,
    o: Options,
    journal: Journal | None,
    before: Climbed | None,
    tell: Callable[[str], None],
) -> Means:
    from trainpace.ladder.shards import make_shards

    def links() -> HostLinks | None:
        profile = profile_here()
        return None if profile is None else profile.host_links

    known = None if before is None else noise_scale_of(before)
    noise = [] if known is None else [known[1]]  # gathered once
    sights = Sights(folder, ladder.device, profile_or_brief, tell, o.timeout, ladder.seed, links)

    def try_it(setup: Setup, seed: int, name: str) -> TrialResult | FailedTrial:
        try:
            if ladder.script is not None:
                return try_script(
                    ladder.script, ladder.start, setup, folder / "trials" / name, ladder.steps or SCRIPT_STEPS,
                    ladder.warmup_steps, o.timeout,
                )  # fmt: skip
            launcher = o.choice.over(ladder.slurm).of(setup.execution)
            trial = _trial(ladder, setup, seed)
            gather = not noise and has_data(setup.task) and not why_no_noise_scale(trial.engine, setup.execution)
            found = run_trial(replace(trial, noise_scale=gather), launcher, folder / "trials" / name, o.timeout)
            if isinstance(found, TrialResult) and found.noise_scale:
                noise.append(found.noise_scale)
            return found
        except TrainpaceError as error:
            return FailedTrial(kind="misuse", reason=str(error))

    def foresee(setups: Sequence[Setup], known: Sequence[Known]) -> list[Foreseen]:
        if o.no_forecast:
            return [Foreseen(reason="--no-forecast") for _ in setups]
        if not ladder.start.task:
            return [Foreseen(reason="a script shows no model; --task MODEL names it") for _ in setups]
        return sights.foresee(setups, known)

    return Means(
        try_it=try_it, foresee=foresee, tell=tell,
        precompute=lambda spec: make_shards(spec, folder, usable_cores(), tell),
        keep=lambda climbed: save(climbed, folder / STATE),
        journal=_keeper(ladder, o, journal),
    )  # fmt: skip


def _trial(ladder: Ladder, setup: Setup, seed: int) -> Any:
    return setup.trial(
        device=ladder.device, seconds=ladder.seconds, steps=ladder.steps, warmup_steps=ladder.warmup_steps, seed=seed
    )


def _dry_run(ladder: Ladder, means: Means, folder: Path, o: Options) -> dict[str, Any]:
    ahead = preview(ladder, means)
    texts = [_texts(rung, ladder, folder, o) for rung in ahead]
    if not o.as_json:
        print_ahead(ahead, texts)
    return ahead_json(ahead, texts)


def _texts(rung: Ahead, ladder: Ladder, folder: Path, o: Options) -> list[str]:
    """What would be started. The requests that it names are written, so that it can be started by hand."""
    found = []
    for i, setup in enumerate(rung.setups):
        if isinstance(setup, Setup):
            with contextlib.suppress(TrainpaceError):  # a forecast or a trial says the same again
                there = folder / "dry-run" / file_name(rung.title, i)
                if ladder.script is not None:
                    found.append(_text_of_script(ladder, ladder.script, setup, there))
                    continue
                job = job_of(_trial(ladder, setup, ladder.seed), there, o.timeout)
                found.append(o.choice.over(ladder.slurm).of(setup.execution).text(job))
    return found


def _text_of_script(ladder: Ladder, script: Script, setup: Setup, folder: Path) -> str:
    """The command on the copies, and how they differ from the user's files."""
    prepared = prepare(script, ladder.start, setup, folder, ladder.steps or SCRIPT_STEPS, ladder.warmup_steps)
    return "\n".join([started_by(prepared.trial), *(written.diff for written in prepared.files if written.diff)])


def _report(climbed: Climbed, o: Options) -> tuple[dict[str, Any], int]:
    t, answer = table_of(climbed), ladder_json(climbed)
    if o.markdown:
        write_whole(o.markdown, markdown(t))
    if o.page or o.figure:
        from trainpace.report.pages.ladder import ladder_page, ladder_pictures

        save_pictures(o._asdict(), lambda: ladder_page(t, answer), lambda: ladder_pictures(t))
    if not o.as_json:
        print_ladder(t)
    return answer, 0 if any(rung.kept for rung in climbed.rungs) else 1


def _keeper(ladder: Ladder, o: Options, journal: Journal | None) -> Callable[[Tried], None]:
    if journal is None:
        return lambda _: None
    local = o.choice.of(ladder.start.execution).name != "slurm"
    device = device_of(ladder.device, detect()) if local else "CPU" if ladder.device == "cpu" else "NVIDIA GPU"

    def keep(one: Tried) -> None:
        nonlocal device  # of a trial that failed: that of the latest one that did not
        device = (device_in(one.measured.environment) if one.measured is not None else "") or device
        entry = entry_of_trial(one, device, ladder.seed, ladder.name)
        journal.add(entry if o.keep_identity else anonymous_entry(entry))

    return keep


def entry_of_trial(one: Tried, device: str, seed: int, model: str) -> Entry:
    """A rung's trial as the journal keeps runs, with what was forecast for it."""
    e, measured, foreseen = one.setup.execution, one.measured, one.foreseen
    fields: dict[str, Any] = {}
    if foreseen.step_ms is not None and foreseen.interval_ms is not None:
        fields |= {
            "forecast_ms": foreseen.step_ms, "forecast_low_ms": foreseen.interval_ms.low,
            "forecast_high_ms": foreseen.interval_ms.high, "forecast_basis": foreseen.basis,
        }  # fmt: skip
    if measured is None:
        fields |= {"outcome": _OUTCOMES.get(one.failure.partition(":")[0], "crashed"), "reason": printable(one.failure)}
    else:
        fields |= {
            "outcome": "ok", "step_time_ms": measured.median_ms, "interval_ms": measured.interval_ms,
            "losses": measured.losses, "peak_memory_gib": measured.peak_memory_gib,
            "reserved_memory_gib": measured.reserved_memory_gib, "environment": measured.environment,
        }  # fmt: skip
    return Entry(
        id=new_id(), created_at=now_utc(), kind="run", model=model, device=device, execution=e,
        num_devices=e.world_size, seed=seed, notes=words_of(one.setup), **fields,
    )  # fmt: skip


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two climbs in one folder would write over each other's state. The lock goes with the process, however that ends."""
    try:
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise cannot_write_into(folder, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainpaceError(
                f"another trainpace run is at work in {folder}.", "Wait for it, or give another --out."
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


@contextlib.contextmanager
def _journal(o: Options) -> Iterator[Journal | None]:
    if o.no_journal or o.dry_run:
        yield None
        return
    with Journal.open(o.place) as journal:
        yield journal
