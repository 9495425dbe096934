"""Climb a ladder: forecast each rung, measure it, and keep or undo it.

Each rung starts from the setup that was kept so far. A ladder comes from the user's `ladder.toml`,
or from a plan that `trainpace plan --output` wrote.
"""

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from trainpace.configs import settings_of
from trainpace.core.errors import (
    Contradiction,
    TrainpaceError,
    UnknownName,
    UnreadableInput,
    UserCodeError,
)
from trainpace.core.execution import Execution
from trainpace.core.intake import read_bytes, toml_of
from trainpace.core.records import Record, from_json
from trainpace.job import DataPath, JobConditions, Schedule
from trainpace.plan import Change, Plan
from trainpace.run.ladder import (
    EXECUTION_KEYS,
    KEYS,
    Ladder,
    Rung,
    Script,
    Setup,
    Value,
    among,
    changed,
)
from trainpace.run.results import (
    Attempt,
    EndToEnd,
    Gain,
    LadderResult,
    LossCheck,
    Measured,
    RungResult,
    compare,
    decision,
    gain_of,
    measured_of,
    own_spread,
)
from trainpace.run.script import (
    SCRIPT_STEPS,
    changed_files,
    fingerprint,
    fingerprint_of_script,
    present,
)
from trainpace.run.slurm import SlurmOptions
from trainpace.run.step_forecasts import MeasuredCompute, StepForecast, compute_of
from trainpace.run.trial import FailedTrial, LoaderSettings, TrialResult
from trainpace.workload import ModelSpec

ROUNDS = 2
"""Number of alternating trials of each setup when two setups are compared again."""
BASELINE = "baseline"
END_TO_END = "end-to-end"
MOST_OTHERS = 100
"""Number of stored rungs from other ladders or other code. Only the latest are kept."""

_MEASURED_ALIKE = "seconds warmup_steps seed device allow_global_batch loss_tolerance steps".split()
"""Ladder settings that affect what a trial measures. They are part of a rung's key."""

ForecastSetups = Callable[[Sequence[Setup], Sequence[MeasuredCompute]], list[StepForecast]]
"""Type of a function that forecasts setups, given the compute measured so far."""


class ClimbActions(NamedTuple):
    """Callbacks of a climb.

    Attributes:
        try_it: Runs a trial of (setup, seed, name).
        forecast: Forecasts setups, given the compute measured so far.
        precompute: Makes the shards of a dataset, FILE.py:NAME, and returns their folder.
        tell: Reports progress.
        keep: Stores the state of the climb.
        journal: Records a measured alternative.
    """

    try_it: Callable[[Setup, int, str], TrialResult | FailedTrial]
    forecast: ForecastSetups
    precompute: Callable[[str], str]
    tell: Callable[[str], None]
    keep: Callable[[LadderResult], None]
    journal: Callable[[Attempt], None]


def climb(
    ladder: Ladder,
    actions: ClimbActions,
    before: LadderResult | None = None,
    stop_early: bool = False,
) -> LadderResult:
    """Try all rungs of a ladder in order and return the results.

    Args:
        ladder: The ladder.
        actions: Callbacks of the climb.
        before: Result of an earlier climb. Its rungs are reused if they would be measured the same
            way.
        stop_early: If True, stop after the first rung that is not kept.

    Raises:
        UserCodeError: If the baseline cannot be measured.
    """
    return _Climb(ladder, actions, before).run(stop_early)


class RungPreview(NamedTuple):
    """A rung before it is measured: its alternatives with their forecasts."""

    title: str
    attempts: list[Attempt]


def preview(ladder: Ladder, actions: ClimbActions) -> list[RungPreview]:
    """Return the forecasts of the baseline and of all rungs. Nothing is trained.

    Each rung starts from the setup with the best forecast in the rung before it.
    """
    kept = ladder.start
    previews = [
        RungPreview(BASELINE, [Attempt(setup=kept, foreseen=actions.forecast([kept], [])[0])])
    ]
    for rung in ladder.rungs:
        attempts = _alternatives(
            rung, kept, ladder, "(shards that are not made yet)", actions.forecast, []
        )
        previews.append(RungPreview(rung.title, attempts))
        possible = [attempt for attempt in attempts if not attempt.failure]
        if possible:
            kept = min(possible, key=lambda attempt: attempt.foreseen.step_ms or math.inf).setup
    return previews


class _Climb:
    """One run of a climb: measures the baseline, each rung, and the total gain."""

    def __init__(self, ladder: Ladder, actions: ClimbActions, before: LadderResult | None) -> None:
        self._ladder, self._actions = ladder, actions
        self._code = (
            fingerprint(ladder.start.task)
            if ladder.script is None
            else fingerprint_of_script(ladder.script)
        )
        done = () if before is None else (before.baseline, *before.others, *before.rungs)
        self._done = {r.key: r for r in done if r.lasting}
        self._before = before
        self._measured: list[MeasuredCompute] = []

    def run(self, stop_early: bool) -> LadderResult:
        results = self._baseline()
        self._learn(results.baseline)
        for rung in self._ladder.rungs:
            result = self._rung(rung, results)
            self._learn(result)
            results = replace(results, rungs=(*results.rungs, result))
            self._keep(results)
            self._actions.tell(
                f"{rung.title}: {'kept' if result.kept else 'undone'}, {result.reason}"
            )
            if stop_early and not result.kept:
                results = replace(
                    results, stopped=f"stopped after {rung.title!r}, which did not help"
                )
                break
        results = replace(
            results, end_to_end=self._end_to_end(results), finished=not results.stopped
        )
        self._keep(results)
        return results

    def _keep(self, results: LadderResult) -> None:
        """Store the results, with reusable rungs of earlier climbs that this climb has not used."""
        used = {
            self._before and self._before.baseline.key,
            *(r.key for r in (results.baseline, *results.rungs)),
        }
        others = [result for key, result in self._done.items() if key not in used]
        self._actions.keep(replace(results, others=tuple(others[-MOST_OTHERS:])))

    def _baseline(self) -> LadderResult:
        """Measure the baseline with two seeds, to learn the spread of its loss curves."""
        start, key = self._ladder.start, self._key([self._ladder.start], None)
        if key in self._done and self._before is not None:
            self._actions.tell(f"{BASELINE}: measured before")
            return LadderResult(
                ladder=self._ladder, baseline=self._done[key], loss_spread=self._before.loss_spread
            )
        begin = time.monotonic()
        foreseen = self._actions.forecast([start], self._measured)[0]
        self._say(BASELINE, foreseen)
        first = self._actions.try_it(start, self._ladder.seed, BASELINE)
        if isinstance(first, FailedTrial):
            raise UserCodeError(
                f"the baseline cannot be measured: {first.reason.rstrip('.')}.", _log(first)
            )
        again = self._actions.try_it(start, self._ladder.seed + 1, f"{BASELINE}-2")
        measured, spread = measured_of(first), 0.0
        if isinstance(again, TrialResult):
            measured = replace(measured, trials_ms=(*measured.trials_ms, again.step_time_ms))
            spread = own_spread(first.losses, again.losses)
        tried = Attempt(setup=start, foreseen=foreseen, measured=measured)
        self._actions.journal(tried)
        result = RungResult(
            title=BASELINE,
            key=key,
            tried=(tried,),
            chosen=0,
            kept=True,
            base_ms=measured.trials_ms,
            seconds=time.monotonic() - begin,
        )
        results = LadderResult(ladder=self._ladder, baseline=result, loss_spread=spread)
        self._keep(results)
        return results

    def _rung(self, rung: Rung, results: LadderResult) -> RungResult:
        """Measure one rung and decide if it is kept. Reuse an earlier result with the same key."""
        kept, measured_before = results.kept
        key = self._key([kept], rung)
        if key in self._done:
            self._actions.tell(f"{rung.title}: measured before")
            return self._done[key]
        begin = time.monotonic()
        result = RungResult(title=rung.title, key=key, base_ms=measured_before.trials_ms)
        shards = ""
        if rung.precompute:
            try:
                shards = self._actions.precompute(rung.precompute)
            except TrainpaceError as error:
                return replace(result, reason=f"its shards cannot be made: {error}")
            result = replace(result, precompute_s=time.monotonic() - begin)
        tried = self._tried(rung, kept, shards)
        measured = [(t.measured.step_time_ms, i) for i, t in enumerate(tried) if t.measured]
        if measured:
            stale = bool(results.rungs) and not results.rungs[-1].kept
            _, chosen = min(measured)
            tried[chosen], base_ms, gain = self._gain(
                rung, kept, measured_before, tried[chosen], stale
            )
            check = self._losses(results, tried[chosen])
            keep, reason = decision(gain, check)
            result = replace(
                result,
                chosen=chosen,
                kept=keep,
                reason=reason,
                base_ms=base_ms,
                gain=gain,
                losses=check,
            )
        else:
            failures = "; ".join(dict.fromkeys(t.failure for t in tried))
            result = replace(result, reason=failures)
        return replace(result, tried=tuple(tried), seconds=time.monotonic() - begin)

    def _tried(self, rung: Rung, kept: Setup, shards: str) -> list[Attempt]:
        """Run a trial of each possible alternative of a rung."""
        attempts = _alternatives(
            rung, kept, self._ladder, shards, self._actions.forecast, self._measured
        )
        for i, attempt in enumerate(attempts):
            if attempt.failure:
                continue
            self._say(rung.title, attempt.foreseen)
            outcome = self._actions.try_it(
                attempt.setup, self._ladder.seed, rung_file_name(rung.title, i)
            )
            if isinstance(outcome, FailedTrial):
                failure = f"{outcome.kind}: {outcome.reason.rstrip('.')}. {_log(outcome)}".strip()
                attempts[i] = replace(attempt, failure=failure)
            else:
                attempts[i] = replace(attempt, measured=measured_of(outcome))
            self._actions.journal(attempts[i])
        return attempts

    def _gain(
        self, rung: Rung, kept: Setup, before: Measured, new: Attempt, stale: bool
    ) -> tuple[Attempt, tuple[float, ...], Gain]:
        """Measure how much faster the new setup is than the kept one.

        If the rung before was undone (`stale`), the kept setup is measured again first, because a
        machine's speed drifts. If the difference is not clear, both setups are measured again in
        turn.

        Returns:
            The attempt with all of its trials, the step times of the kept setup in ms, and the
            gain.
        """
        assert new.measured is not None
        name = rung_file_name(rung.title, 0)
        # An empty list means that the trial failed.
        old_ms = (self._again(kept, f"{name}-before") if stale else []) or [before.step_time_ms]
        new_ms = list(new.measured.trials_ms)
        gain = gain_of(_per_sample(old_ms, kept), _per_sample(new_ms, new.setup))
        if not gain.clear:
            text = f"{gain.ratio:.2f}x is within the noise of one trial, so both are tried again"
            self._actions.tell(f"{rung.title}: {text}")
            old_again, new_again = self._in_turn(kept, new.setup, f"{name}-again")
            old_ms, new_ms = old_again or [before.step_time_ms], new_ms + new_again
            gain = gain_of(_per_sample(old_ms, kept), _per_sample(new_ms, new.setup))
        return (
            replace(new, measured=replace(new.measured, trials_ms=tuple(new_ms))),
            tuple(old_ms),
            gain,
        )

    def _in_turn(self, one: Setup, other: Setup, name: str) -> tuple[list[float], list[float]]:
        """Run `ROUNDS` alternating trials of two setups, and return the step times of each in ms.

        Failed trials are skipped.
        """
        one_ms: list[float] = []
        other_ms: list[float] = []
        for turn in range(ROUNDS):
            one_ms += self._again(one, f"{name}-{turn}")
            other_ms += self._again(other, f"{name}-{turn}")
        return one_ms, other_ms

    def _again(self, setup: Setup, name: str) -> list[float]:
        """Run one more trial and return its step time in ms, or nothing if it failed."""
        outcome = self._actions.try_it(setup, self._ladder.seed, name)
        return [outcome.step_time_ms] if isinstance(outcome, TrialResult) else []

    def _end_to_end(self, results: LadderResult) -> EndToEnd | None:
        """Compare the first setup with the last kept one in alternating trials.

        The product of the rungs' speed-ups overestimates the total: rungs with lucky trials were
        kept, and the machine's speed drifts during a climb. Return None if fewer than two rungs
        were kept, or if all trials of one setup failed.
        """
        if sum(rung.kept for rung in results.rungs) < 2:
            return None
        first, last = self._ladder.start, results.kept[0]
        key = self._key([first, last], None)
        before = self._before and self._before.end_to_end
        if before and before.key == key:
            return before
        self._actions.tell("measuring the first and the last setup in turn")
        first_ms, last_ms = self._in_turn(first, last, END_TO_END)
        if not first_ms or not last_ms:
            self._actions.tell(
                "one of them failed: the total is the product of the rungs' speed-ups"
            )
            return None
        gain = gain_of(_per_sample(first_ms, first), _per_sample(last_ms, last))
        return EndToEnd(key=key, first_ms=tuple(first_ms), last_ms=tuple(last_ms), gain=gain)

    def _losses(self, results: LadderResult, new: Attempt) -> LossCheck:
        """Compare the loss of a new setup with the baseline's."""
        assert new.measured is not None
        if new.setup.execution.global_batch != self._ladder.start.execution.global_batch:
            return LossCheck(verdict="not compared", reason="different global batch")
        if not new.measured.losses or not results.start.losses:
            return LossCheck(verdict="not compared", reason="the losses are not known")
        return compare(
            results.start.losses,
            new.measured.losses,
            self._ladder.loss_tolerance,
            results.loss_spread,
        )

    def _learn(self, result: RungResult) -> None:
        """Remember the measured compute of a rung, for later forecasts."""
        for attempt in result.tried:
            if (m := attempt.measured) is not None:
                compute = compute_of(
                    attempt.setup, m.trials_ms[0], m.compute_ms, attempt.foreseen.data_ms
                )
                self._measured += [compute] if compute is not None else []

    def _say(self, title: str, foreseen: StepForecast) -> None:
        unknown = foreseen.step_ms is None
        words = (
            f"no forecast ({foreseen.reason})"
            if unknown
            else f"forecast {foreseen.step_ms:.4g} ms per step"
        )
        self._actions.tell(f"{title}: {words}; measuring")

    def _key(self, setups: Sequence[Setup], rung: Rung | None) -> str:
        """Return a hash of all that affects a measurement."""
        settings = tuple(getattr(self._ladder, name) for name in _MEASURED_ALIKE)
        measured_alike = (self._code, setups, rung, *settings)
        return hashlib.sha256(msgspec.json.encode(measured_alike)).hexdigest()[:32]


def _alternatives(
    rung: Rung,
    kept: Setup,
    ladder: Ladder,
    shards: str,
    forecast: ForecastSetups,
    measured: Sequence[MeasuredCompute],
) -> list[Attempt]:
    """Return the alternatives of a rung with their forecasts.

    An alternative that is impossible has its reason in `failure`.
    """
    attempts = []
    for values in rung.alternatives():
        try:
            own: dict[str, Value] = {"shards": shards} if rung.precompute else {}
            setup = changed(kept, values | own, ladder.allow_global_batch)
            setup = replace(
                setup,
                settings=setup.settings | rung.settings,
                environment=setup.environment | rung.environment,
            )
            if ladder.script is not None:
                changed_files(ladder, setup)  # Raises TrainpaceError if no file can hold a change.
            attempts.append(Attempt(setup=setup, foreseen=StepForecast()))
        except TrainpaceError as error:
            failed = StepForecast(reason=str(error))
            attempts.append(Attempt(setup=kept, foreseen=failed, failure=failed.reason))
    foreseen = iter(forecast([a.setup for a in attempts if not a.failure], measured))
    return [a if a.failure else replace(a, foreseen=next(foreseen)) for a in attempts]


def make_shards(target: str, folder: Path, workers: int, tell: Callable[[str], None]) -> str:
    """Precompute the dataset FILE.py:NAME into the climb's folder, and return the shards' folder.

    Raises:
        TrainpaceError: If the dataset cannot be precomputed, or another process still computes a
            part.
    """
    from trainpace.shards import Settings, precompute

    name = re.sub(r"[^\w.-]+", "-", ModelSpec.of(target).name)
    shards = folder / f"shards-{name}"
    tell(f"precomputing {target} into {shards}")
    done = precompute(Settings(target=target, folder=str(shards), workers=workers), note=tell)
    if not done.finished:
        raise TrainpaceError(
            f"the shards in {shards} are incomplete.",
            "Another part still has to compute its share.",
        )
    return str(shards)


def rung_file_name(title: str, number: int) -> str:
    """Return a rung's title and the number of an alternative as a safe file name."""
    return f"{re.sub('[^a-z0-9]+', '-', title.lower()).strip('-')[:40]}-{number}"


def _per_sample(times_ms: Sequence[float], setup: Setup) -> list[float]:
    """Divide step times by the global batch, so that different global batches are comparable."""
    return [t / setup.execution.global_batch for t in times_ms]


def _log(failed: FailedTrial) -> str:
    return f"Its log: {failed.log}" if failed.log and Path(failed.log).is_file() else ""


OTHER_FIELDS = ("rungs", "script", "conditions")
TOP_KEYS = (
    "task",
    "command",
    "config",
    "rung",
    *(k for k in Ladder.__struct_fields__ if k not in OTHER_FIELDS),
)
"""Keys allowed at the top level of a ladder file."""
CONDITION_KEYS = tuple(
    name
    for name in JobConditions.__struct_fields__
    if name not in ("price_usd_per_device_hour", "stated")
)
"""Keys in [job] that are fields of `JobConditions`."""
JOB_KEYS = (*Schedule.__struct_fields__, *CONDITION_KEYS)
"""Keys allowed in the table [job] of a ladder file."""
OF_A_PLAN = tuple(k for k in EXECUTION_KEYS if k not in ("accumulation", "optimizer"))
"""Execution fields that identify a plan's change.

The accumulation follows from the other fields. The optimizer does not change.
"""


def read_ladder(
    path: Path, task: str | None = None, precompute: str = "", script: Script | None = None
) -> Ladder:
    """Read a ladder from a .toml file, or make one from a plan in a .json file.

    Args:
        path: The file. Errors name it.
        task: Replaces the file's own task.
        precompute: Dataset FILE.py:NAME for the shards of a plan.
        script: Script to train if the file names none.

    Raises:
        UnreadableInput: If the file is not a valid ladder or plan.
        TrainpaceError: If the file has no task, no script or no rung.
    """
    text = read_bytes(path)
    if path.suffix == ".toml":
        return _from_toml(text, path, task, script)
    if path.suffix != ".json":
        raise UnreadableInput(
            f"{path} is neither a ladder (.toml) nor a plan (.json).",
            "trainpace plan --output makes one.",
        )
    return ladder_of_plan(from_json(text, Plan, str(path)), task, precompute, script)


def _from_toml(text: bytes, path: Path, task: str | None, script: Script | None) -> Ladder:
    """Read a ladder from TOML."""
    read = toml_of(text, str(path))
    _check_tables(read, path)
    try:
        return _of_tables(read, path, task, script)
    except msgspec.ValidationError as error:
        raise UnreadableInput(f"{path}: {error}.") from None
    except UnknownName:
        raise
    except TrainpaceError as error:
        raise TrainpaceError(f"{path}: {error.message}", error.hint) from None


def _of_tables(read: dict[str, Any], path: Path, task: str | None, script: Script | None) -> Ladder:
    start, job, rungs = read.pop("start", {}), read.pop("job", None), read.pop("rung", [])
    own_task = _beside(path, str(read.pop("task", "")))
    spec = task or own_task
    script = _script_of(read, path) or script
    if not spec and script is None:
        raise TrainpaceError(
            'it names no task: add task = "FILE.py:FUNCTION", or pass --task.',
            'For an unchanged script: command = "torchrun train.py ...", config = ["ds.json"].',
        )
    if not rungs:
        raise TrainpaceError("it has no [[rung]] to try.")
    if "shards" in start:
        start["shards"] = str(path.parent / str(start["shards"]))
    if script is not None:
        read = {"steps": SCRIPT_STEPS, **read, "script": script}
    ladder = read | _job_of(job) | {"rungs": [_rung(rung, path) for rung in rungs]}
    ladder["start"] = _start_of(script, start, spec)
    return msgspec.convert(msgspec.to_builtins(ladder), Ladder)


def _check_tables(read: dict[str, Any], path: Path) -> None:
    """Raise an error for unknown keys outside rungs, and for tables that are not tables."""
    _check_names(read, TOP_KEYS, f"key of {path.name}")
    known = {"start": KEYS, "job": JOB_KEYS, "slurm": SlurmOptions.__struct_fields__}
    rungs = read.get("rung", [])
    tables = [*(read.get(name, {}) for name in known), *(rungs if isinstance(rungs, list) else [0])]
    if not all(isinstance(table, dict) for table in tables):
        raise UnreadableInput(
            f"{path}: [start], [job] and [slurm] must be tables, and so must each [[rung]]."
        )
    for name, keys in known.items():
        _check_names(read.get(name, {}), keys, f"key in [{name}] of {path.name}")


def _start_of(script: Script | None, start: dict[str, Any], spec: str) -> Setup:
    if script is not None:
        return start_of_script(script, start, spec)
    if "global_batch" not in start:
        start = {"accumulation": 1, "micro_batch": 1, **start}
    return changed(Setup(task=spec, execution=Execution()), start, allow_global_batch=True)


def _job_of(job: dict[str, Any] | None) -> dict[str, Any]:
    """Split the table [job] into the fields `job` (a schedule) and `conditions`."""
    if job is None:
        return {}
    conditions = {name: value for name, value in job.items() if name in CONDITION_KEYS}
    schedule = {name: value for name, value in job.items() if name not in conditions}
    return {"job": schedule, "conditions": conditions | {"stated": tuple(conditions)}}


def _script_of(read: dict[str, Any], path: Path) -> Script | None:
    """Remove the keys `command` and `config`, and return the script that they describe, or None."""
    command, configs = read.pop("command", None), read.pop("config", [])
    if command is None and configs:
        hint = 'Add command = "torchrun train.py ..."'
        raise TrainpaceError("it names settings files, but no command.", hint)
    if command is None:
        return None
    configs = [configs] if isinstance(configs, str) else configs
    fields = {"command": command, "configs": configs, "folder": str(path.parent)}
    return msgspec.convert(fields, Script)


def start_of_script(script: Script, given: dict[str, Any], task: str = "") -> Setup:
    """Return a script's current setup. `given` fills in what its own settings do not state.

    Raises:
        Contradiction: If a given value differs from the script's own setting.
        TrainpaceError: If neither states the number of samples per step.
    """
    now = present(script)
    e = now.execution
    for key, value in given.items():
        if now.stated.get(key, value) != value:
            raise Contradiction(
                (
                    f"[start] says {key} {value}, but the script's own settings say"
                    f" {now.stated[key]}."
                ),
                "Leave it out.",
            )
    if not {"micro_batch", "global_batch"} & (now.stated | given).keys():
        raise TrainpaceError(
            "the script's settings do not state the number of samples per step.",
            "Add micro_batch to [start].",
        )
    if "global_batch" not in given:
        given = {"micro_batch": e.micro_batch, "accumulation": e.accumulation, **given}
    setup = Setup(task=task, execution=e, loader=LoaderSettings(workers=now.workers))
    return changed(setup, given, allow_global_batch=True)


def _rung(table: dict[str, Any], path: Path) -> Rung:
    """Read one [[rung]] table."""
    _check_names(table, (*_OTHERS, *KEYS), f"setting in [[rung]] of {path.name}")
    others = msgspec.convert(among(table, _OTHERS), _RungTable)
    changes = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    changes = {k: v for k, v in changes.items() if k not in _OTHERS}
    if "shards" in changes:
        changes["shards"] = str(path.parent / str(changes["shards"]))
    environment = {name: str(value) for name, value in others.environment.items()}
    described = ", ".join(f"{k} {v}" for k, v in (changes | others.settings | environment).items())
    return Rung(
        title=others.title or described or "precomputed shards",
        changes=changes,
        precompute=_beside(path, others.precompute),
        settings=others.settings,
        environment=environment,
    )


class _RungTable(Record):
    """Keys of a [[rung]] table other than changes of a setup."""

    title: str = ""
    precompute: str = ""
    settings: dict[str, Value] = msgspec.field(default_factory=dict)
    environment: dict[str, str | int] = msgspec.field(default_factory=dict)


_OTHERS = _RungTable.__struct_fields__


def ladder_of_plan(
    plan: Plan, task: str | None = None, precompute: str = "", script: Script | None = None
) -> Ladder:
    """Return a ladder with one rung per change of a plan.

    Raises:
        TrainpaceError: If the plan has no changes or no model, or a dataset to precompute is
            missing.
        Contradiction: If the script's current settings differ from the plan's start.
    """
    spec = task or plan.model
    if not spec and script is None:
        raise TrainpaceError(
            "the plan names no model.", "Pass --task FILE.py:FUNCTION, or make the plan again."
        )
    if not plan.changes:
        raise TrainpaceError("the plan has no changes to carry out.", plan.reason)
    data = plan.now.choice.data if plan.now is not None else DataPath()
    states = [(plan.start, data), *((change.execution, change.data) for change in plan.changes)]
    rungs = (
        _rung_of_change(change, *before, precompute)
        for change, before in zip(plan.changes, states, strict=False)
    )
    start = Setup(task=spec, execution=plan.start, loader=LoaderSettings(workers=data.workers or 0))
    ladder = Ladder(
        start=start,
        rungs=tuple(rungs),
        job=plan.job,
        conditions=plan.conditions,
        device="cuda",
        allow_global_batch=len({execution.global_batch for execution, _ in states}) > 1,
    )
    if script is None:
        return ladder
    _check_start(plan, script)
    return replace(ladder, script=script, steps=SCRIPT_STEPS)


def _check_start(plan: Plan, script: Script) -> None:
    """Raise Contradiction if the script's settings differ from the plan's start."""
    stated, planned = present(script).stated, settings_of(plan.start)
    clashes = [
        f"{name} {planned[name]}, but the script has {stated[name]}"
        for name in sorted(stated.keys() & planned.keys())
        if stated[name] != planned[name]
    ]
    if clashes:
        raise Contradiction(
            f"the plan starts from {', '.join(clashes)}.",
            "Make the plan from the same files and command.",
        )


def _rung_of_change(change: Change, execution: Execution, data: DataPath, precompute: str) -> Rung:
    """Return the rung that turns the setup before a plan's change into the one after it."""
    after = change.execution
    changes: dict[str, Any] = {
        key: getattr(after, key)
        for key in (*OF_A_PLAN, "global_batch")
        if getattr(after, key) != getattr(execution, key)
    }
    if change.data.workers != data.workers:
        changes["workers"] = change.data.workers or 0
    if not change.data.precomputed or data.precomputed:
        precompute = ""
    elif not precompute:
        raise TrainpaceError(
            f"the plan's {change.title!r} does not say which dataset to precompute.",
            "Pass --precompute FILE.py:NAME.",
        )
    if not changes and not precompute:
        changes = {"accumulation": after.accumulation}
    return Rung(title=change.title, changes=changes, precompute=precompute)


def _check_names(table: Mapping[str, Any], keys: Iterable[str], what: str) -> None:
    for key in table:
        if key not in keys:
            raise UnknownName(what, key, keys)


def _beside(path: Path, spec: str) -> str:
    """Return FILE.py:NAME with a path relative to the ladder's folder."""
    named = ModelSpec.of(spec)
    return named.with_path(path.parent / named.path) if named.runs_code else spec
