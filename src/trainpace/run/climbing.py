"""The climb: forecast a rung, try it, keep it if it helps, else undo it; the next one starts from what is kept."""

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
from trainpace.core.records import from_json
from trainpace.job import JobConditions, Schedule
from trainpace.plan import Change, DataPath, Plan
from trainpace.run.ladder import EXECUTION_KEYS, KEYS, Ladder, Rung, Script, Setup, changed
from trainpace.run.results import (
    Attempt,
    EndToEnd,
    Gain,
    LadderResult,
    LossCheck,
    Measured,
    RungResult,
    compare,
    gain_of,
    judged,
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
"""How often two setups are measured in turn: the kept and a new one that are too close to tell, and the first and the last."""
BASELINE = "baseline"
END_TO_END = "end-to-end"
MOST_OTHERS = 100
"""Rungs of other ladders and other code that are kept, the latest."""

ForecastSetups = Callable[[Sequence[Setup], Sequence[MeasuredCompute]], list[StepForecast]]
"""Forecasts of setups, from what was measured before."""


class ClimbActions(NamedTuple):
    """What a climb asks the rest of the program to do. `try_it` (setup, seed, name) runs a trial; `precompute` (FILE.py:NAME)
    gives the folder of its shards; `keep` stores the state, `journal` a trial."""

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
    """Try all rungs; `before` is an earlier climb, of which rungs that would be measured alike are not measured again. Raises
    UserCodeError where the baseline itself cannot be measured: nothing could be compared with it.
    """
    return _Climb(ladder, actions, before).run(stop_early)


class RungPreview(NamedTuple):
    """A rung before anything is measured: its alternatives, each with its forecast, or with a failure where it cannot be."""

    title: str
    attempts: list[Attempt]


def preview(ladder: Ladder, actions: ClimbActions) -> list[RungPreview]:
    """The baseline and all rungs, as if of every rung the alternative were kept whose forecast is best. Trains nothing."""
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
        """With what earlier climbs measured and this one has not come to: it may be ended before, or go another way."""
        used = {
            self._before and self._before.baseline.key,
            *(r.key for r in (results.baseline, *results.rungs)),
        }
        others = [result for key, result in self._done.items() if key not in used]
        self._actions.keep(replace(results, others=tuple(others[-MOST_OTHERS:])))

    def _baseline(self) -> LadderResult:
        """Measured twice, with two seeds: how far apart its own loss curves are."""
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
            reason="",
            base_ms=measured.trials_ms,
            seconds=time.monotonic() - begin,
        )
        results = LadderResult(ladder=self._ladder, baseline=result, loss_spread=spread)
        self._keep(results)
        return results

    def _rung(self, rung: Rung, results: LadderResult) -> RungResult:
        kept, measured_before = results.kept
        key = self._key([kept], rung)
        if key in self._done:
            self._actions.tell(f"{rung.title}: measured before")
            return self._done[key]
        begin = time.monotonic()
        result = RungResult(
            title=rung.title,
            key=key,
            tried=(),
            chosen=None,
            kept=False,
            reason="",
            base_ms=measured_before.trials_ms,
        )
        shards, precompute_s = "", 0.0
        if rung.precompute:
            try:
                shards = self._actions.precompute(rung.precompute)
            except TrainpaceError as error:
                return replace(result, reason=f"its shards cannot be made: {error}")
            precompute_s = time.monotonic() - begin
        tried = self._tried(rung, kept, shards)
        measured = [(i, t.measured) for i, t in enumerate(tried) if t.measured is not None]
        if not measured:
            reason = "; ".join(dict.fromkeys(t.failure for t in tried))
            return replace(
                result, tried=tuple(tried), reason=reason, seconds=time.monotonic() - begin
            )
        chosen = min(measured, key=lambda row: row[1].step_time_ms)[0]
        stale = bool(results.rungs) and not results.rungs[-1].kept
        tried[chosen], base_ms, gain = self._gain(rung, kept, measured_before, tried[chosen], stale)
        check = self._losses(results, tried[chosen])
        keep, reason = judged(gain, check)
        return replace(
            result,
            tried=tuple(tried),
            chosen=chosen,
            kept=keep,
            reason=reason,
            base_ms=base_ms,
            gain=gain,
            losses=check,
            precompute_s=precompute_s,
            seconds=time.monotonic() - begin,
        )

    def _tried(self, rung: Rung, kept: Setup, shards: str) -> list[Attempt]:
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
        """Where the two are close, both are tried again in turn; where other rungs were tried since the kept setup was
        (`stale`), that is tried again, since a machine gets slower and faster meanwhile."""
        assert new.measured is not None
        old_ms, new_ms = [before.step_time_ms], list(new.measured.trials_ms)
        again = (
            self._actions.try_it(kept, self._ladder.seed, f"{rung_file_name(rung.title, 0)}-before")
            if stale
            else None
        )
        if isinstance(again, TrialResult):
            old_ms = [again.step_time_ms]
        gain = gain_of(_per_sample(old_ms, kept), _per_sample(new_ms, new.setup))
        if not gain.clear:
            noise = "is within the noise of one trial, so both are tried again"
            self._actions.tell(f"{rung.title}: {gain.ratio:.2f}x {noise}")
            old_again, new_again = self._in_turn(
                kept, new.setup, f"{rung_file_name(rung.title, 0)}-again"
            )
            old_ms, new_ms = old_again or [before.step_time_ms], new_ms + new_again
            gain = gain_of(_per_sample(old_ms, kept), _per_sample(new_ms, new.setup))
        return (
            replace(new, measured=replace(new.measured, trials_ms=tuple(new_ms))),
            tuple(old_ms),
            gain,
        )

    def _in_turn(self, one: Setup, other: Setup, name: str) -> tuple[list[float], list[float]]:
        """A step of each trial of both setups, tried one after the other, `ROUNDS` times; without trials that failed."""
        one_ms: list[float] = []
        other_ms: list[float] = []
        for turn in range(ROUNDS):
            for setup, times in ((one, one_ms), (other, other_ms)):
                again = self._actions.try_it(setup, self._ladder.seed, f"{name}-{turn}")
                if isinstance(again, TrialResult):
                    times.append(again.step_time_ms)
        return one_ms, other_ms

    def _end_to_end(self, results: LadderResult) -> EndToEnd | None:
        """The first setup against the last. The product of the rungs' speed-ups says too much, since a rung that was lucky in
        its trials was kept for it; and a machine gets slower and faster during a climb."""
        if sum(rung.kept for rung in results.rungs) < 2:
            return None
        first, last = self._ladder.start, results.kept[0]
        key = self._key([first, last], None)
        if (
            self._before is not None
            and self._before.end_to_end is not None
            and self._before.end_to_end.key == key
        ):
            return self._before.end_to_end
        self._actions.tell("the first and the last setup: measuring both in turn")
        first_ms, last_ms = self._in_turn(first, last, END_TO_END)
        if not first_ms or not last_ms:
            self._actions.tell(
                "one of them failed: the total is the product of the rungs' speed-ups"
            )
            return None
        gain = gain_of(_per_sample(first_ms, first), _per_sample(last_ms, last))
        return EndToEnd(key=key, first_ms=tuple(first_ms), last_ms=tuple(last_ms), gain=gain)

    def _losses(self, results: LadderResult, new: Attempt) -> LossCheck:
        assert new.measured is not None
        if new.setup.execution.global_batch != self._ladder.start.execution.global_batch:
            return LossCheck(verdict="not compared", reason="another global batch")
        if not new.measured.losses or not results.start.losses:
            return LossCheck(verdict="not compared", reason="no losses were seen")
        return compare(
            results.start.losses,
            new.measured.losses,
            self._ladder.loss_tolerance,
            results.loss_spread,
        )

    def _learn(self, result: RungResult) -> None:
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
            else f"forecast {foreseen.step_ms:.4g} ms a step"
        )
        self._actions.tell(f"{title}: {words}; measuring")

    def _key(self, setups: Sequence[Setup], rung: Rung | None) -> str:
        names = (
            "seconds",
            "warmup_steps",
            "seed",
            "device",
            "allow_global_batch",
            "loss_tolerance",
            "steps",
        )
        measured_alike = (
            self._code,
            setups,
            rung,
            *(getattr(self._ladder, name) for name in names),
        )
        return hashlib.sha256(msgspec.json.encode(measured_alike)).hexdigest()[:32]


def _alternatives(
    rung: Rung,
    kept: Setup,
    ladder: Ladder,
    shards: str,
    forecast: ForecastSetups,
    measured: Sequence[MeasuredCompute],
) -> list[Attempt]:
    """The alternatives of a rung with their forecasts; one that is impossible has the reason as its failure."""
    setups: list[Setup | str] = []
    for values in rung.alternatives():
        try:
            setup = changed(
                kept,
                values | ({"shards": shards} if rung.precompute else {}),
                ladder.allow_global_batch,
            )
            setup = replace(
                setup,
                settings=setup.settings | rung.settings,
                environment=setup.environment | rung.environment,
            )
            if ladder.script is not None:
                changed_files(ladder, setup)  # which says what no file takes
            setups.append(setup)
        except TrainpaceError as error:
            setups.append(str(error))
    possible = [setup for setup in setups if isinstance(setup, Setup)]
    foreseen = iter(forecast(possible, measured) if possible else [])
    return [
        (
            Attempt(setup=kept, foreseen=StepForecast(reason=setup), failure=setup)
            if isinstance(setup, str)
            else Attempt(setup=setup, foreseen=next(foreseen))
        )
        for setup in setups
    ]


def make_shards(target: str, folder: Path, workers: int, tell: Callable[[str], None]) -> str:
    """The folder with the shards of FILE.py:NAME, made once into a climb's folder. Raises as `shards.precompute` does, and where
    another part must go on."""
    from trainpace.shards import Settings, precompute

    name = re.sub(r"[^\w.-]+", "-", ModelSpec.of(target).name)
    shards = folder / f"shards-{name}"
    tell(f"precomputing {target} into {shards}")
    done = precompute(Settings(target=target, folder=str(shards), workers=workers), note=tell)
    if not done.finished:
        raise TrainpaceError(
            f"the shards in {shards} are not all there.",
            "Another part has still to compute its own.",
        )
    return str(shards)


def rung_file_name(title: str, number: int) -> str:
    return f"{re.sub('[^a-z0-9]+', '-', title.lower()).strip('-')[:40]}-{number}"


def _per_sample(times_ms: Sequence[float], setup: Setup) -> list[float]:
    """Times divided by the global batch, so that steps of different global batches compare."""
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
CONDITION_KEYS = tuple(
    name
    for name in JobConditions.__struct_fields__
    if name not in ("price_usd_per_device_hour", "stated")
)
JOB_KEYS = (*Schedule.__struct_fields__, *CONDITION_KEYS)
OF_A_PLAN = tuple(k for k in EXECUTION_KEYS if k not in ("accumulation", "optimizer"))
"""What a plan's changes are told by. Accumulation follows from the rest, and the optimizer stays."""


def read_ladder(
    path: Path, task: str | None = None, precompute: str = "", script: Script | None = None
) -> Ladder:
    """The ladder that a file holds. `task` and `script` go before the file's own; `precompute` names the dataset of a plan's
    shards. Errors name the file."""
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
    read = toml_of(text, str(path))
    _check_names(read, TOP_KEYS, f"key of {path.name}")
    start, job, slurm, rungs = (
        read.pop("start", {}),
        read.pop("job", None),
        read.get("slurm", {}),
        read.pop("rung", []),
    )
    if not isinstance(rungs, list) or not all(
        isinstance(table, dict) for table in (start, job or {}, slurm, *rungs)
    ):
        raise UnreadableInput(
            f"{path}: [start], [job] and [slurm] are tables, and each [[rung]] is one."
        )
    own_task = _beside(path, str(read.pop("task", "")))
    spec = task or own_task
    script = _script_of(read, path) or script
    if not spec and script is None:
        raise TrainpaceError(
            f'{path} names no task: task = "FILE.py:FUNCTION", or give --task.',
            'An unchanged script is command = "torchrun train.py ...", with config = ["ds.json"].',
        )
    _check_names(start, KEYS, f"setting in [start] of {path.name}")
    _check_names(job or {}, JOB_KEYS, f"key in [job] of {path.name}")
    _check_names(slurm, SlurmOptions.__struct_fields__, f"key in [slurm] of {path.name}")
    if not rungs:
        raise TrainpaceError(f"{path} has no [[rung]] to try.")
    if "shards" in start:
        start["shards"] = str(path.parent / str(start["shards"]))
    try:
        if script is not None:
            setup = start_of_script(script, start, spec)
            read = {"steps": SCRIPT_STEPS, **read, "script": script}
        else:
            if "global_batch" not in start:
                start = {"accumulation": 1, "micro_batch": 1, **start}
            setup = changed(Setup(task=spec, execution=Execution()), start, allow_global_batch=True)
        if job is not None:
            conditions = {name: value for name, value in job.items() if name in CONDITION_KEYS}
            read["job"] = {name: value for name, value in job.items() if name not in conditions}
            read["conditions"] = conditions | {"stated": tuple(conditions)}
        ladder = read | {"start": setup, "rungs": [_rung(rung, path) for rung in rungs]}
        return msgspec.convert(msgspec.to_builtins(ladder), Ladder)
    except msgspec.ValidationError as error:
        raise UnreadableInput(f"{path}: {error}.") from None
    except UnknownName:
        raise
    except TrainpaceError as error:
        raise TrainpaceError(f"{path}: {error.message}", error.hint) from None


def _script_of(read: dict[str, Any], path: Path) -> Script | None:
    """The script that the keys `command` and `config` name; they are taken out."""
    command, configs = read.pop("command", None), read.pop("config", [])
    configs = [configs] if isinstance(configs, str) else configs
    if command is None:
        if configs:
            hint = 'Add command = "torchrun train.py ..."'
            raise TrainpaceError(f"{path} names settings files and no command.", hint)
        return None
    if (
        not isinstance(command, str)
        or not isinstance(configs, list)
        or not all(isinstance(c, str) for c in configs)
    ):
        raise UnreadableInput(f"{path}: command is text, and config a list of files.")
    return Script(command=command, configs=tuple(configs), folder=str(path.parent))


def start_of_script(script: Script, given: Mapping[str, Any], task: str = "") -> Setup:
    """How a script trains now: what its settings say, and what is `given` where they say nothing. Raises Contradiction where both
    say something else, TrainpaceError where nothing says how many samples a step has."""
    now = present(script)
    e = now.execution
    settings = settings_of(e) | {"workers": now.workers}
    stated = now.stated | ({"workers"} if "dataloader_workers" in now.stated else set())
    for key, value in given.items():
        if key in stated and settings[key] != value:
            raise Contradiction(
                f"[start] says {key} {value}, and the script's own settings {settings[key]}.",
                "Leave it out.",
            )
    if not {"micro_batch", "global_batch"} & (stated | given.keys()):
        raise TrainpaceError(
            "the script's settings do not say how many samples a step has.",
            "Say it: micro_batch in [start].",
        )
    if "global_batch" not in given:
        given = {"micro_batch": e.micro_batch, "accumulation": e.accumulation, **given}
    setup = Setup(task=task, execution=e, loader=LoaderSettings(workers=now.workers))
    return changed(setup, dict(given), allow_global_batch=True)


def _rung(table: dict[str, Any], path: Path) -> Rung:
    others = ("title", "precompute", "settings", "environment")
    _check_names(table, (*others, *KEYS), f"setting in [[rung]] of {path.name}")
    changes = {
        k: tuple(v) if isinstance(v, list) else v for k, v in table.items() if k not in others
    }
    if "shards" in changes:
        changes["shards"] = str(path.parent / str(changes["shards"]))
    precompute = _beside(path, str(table.get("precompute", "")))
    settings = table.get("settings", {})
    if not isinstance(settings, dict) or any(
        isinstance(value, dict | list) for value in settings.values()
    ):
        hint = 'Write settings = {"data.shards" = "{shards}"}.'
        raise UnreadableInput(f"{path}: settings are keys in quotes, each with one value.", hint)
    environment = table.get("environment", {})
    values = environment.values() if isinstance(environment, dict) else [None]
    if not all(isinstance(value, str | int) and not isinstance(value, bool) for value in values):
        hint = 'Write environment = { OMP_PROC_BIND = "true" }.'
        raise UnreadableInput(
            f"{path}: environment is a table of variables whose values are text or whole numbers.",
            hint,
        )
    environment = {name: str(value) for name, value in environment.items()}
    title = (
        table.get("title")
        or ", ".join(f"{k} {v}" for k, v in (changes | settings | environment).items())
        or "precomputed shards"
    )
    return Rung(
        title=str(title),
        changes=changes,
        precompute=precompute,
        settings=settings,
        environment=environment,
    )


def ladder_of_plan(
    plan: Plan, task: str | None = None, precompute: str = "", script: Script | None = None
) -> Ladder:
    """A plan's changes as rungs. Raises TrainpaceError where the plan has no changes, or no model is named; Contradiction where
    a script does not train as the plan takes it to train now."""
    spec = task or plan.model
    if not spec and script is None:
        raise TrainpaceError(
            "the plan names no model.", "Give --task FILE.py:FUNCTION, or make the plan again."
        )
    if not plan.changes:
        raise TrainpaceError("the plan has no changes to carry out.", plan.reason)
    data = plan.now.choice.data if plan.now is not None else DataPath()
    start = Setup(task=spec, execution=plan.start, loader=LoaderSettings(workers=data.workers or 0))
    rungs, before = [], (plan.start, data)
    for change in plan.changes:
        rungs.append(_rung_of_change(change, *before, precompute))
        before = change.execution, change.data
    batches = {change.execution.global_batch for change in plan.changes} - {plan.start.global_batch}
    if script is not None:
        now, planned = present(script), settings_of(plan.start)
        settings = settings_of(now.execution)
        clashes = [
            f"{name} {planned[name]}, where the script has {settings[name]}"
            for name in sorted(now.stated & planned.keys())
            if settings[name] != planned[name]
        ]
        if clashes:
            raise Contradiction(
                f"the plan starts from {', '.join(clashes)}.",
                "Make the plan of the same files and command.",
            )
    return Ladder(
        start=start,
        rungs=tuple(rungs),
        job=plan.job,
        conditions=plan.conditions,
        device="cuda",
        allow_global_batch=bool(batches),
        script=script,
        steps=None if script is None else SCRIPT_STEPS,
    )


def _rung_of_change(change: Change, execution: Execution, data: DataPath, precompute: str) -> Rung:
    after = change.execution
    changes: dict[str, Any] = {
        key: getattr(after, key)
        for key in OF_A_PLAN
        if getattr(after, key) != getattr(execution, key)
    }
    if after.global_batch != execution.global_batch:
        changes["global_batch"] = after.global_batch
    if change.data.workers != data.workers:
        changes["workers"] = change.data.workers or 0
    shards = change.data.precomputed and not data.precomputed
    if shards and not precompute:
        raise TrainpaceError(
            f"the plan's {change.title!r} needs to know which dataset to precompute.",
            "Give --precompute FILE.py:NAME, as trainpace precompute takes it.",
        )
    if not changes and not shards:
        changes = {"accumulation": after.accumulation}
    return Rung(title=change.title, changes=changes, precompute=precompute if shards else "")


def _check_names(table: Mapping[str, Any], keys: Iterable[str], what: str) -> None:
    for key in table:
        if key not in keys:
            raise UnknownName(what, key, keys)


def _beside(path: Path, spec: str) -> str:
    """FILE.py:NAME is meant from the ladder's own folder, wherever the command is called."""
    named = ModelSpec.of(spec)
    return named.with_path(path.parent / named.path) if named.runs_code else spec
