"""A ladder from a file of the user's own (`ladder.toml`), or from a plan that `trainpace plan --output` kept."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainpace.configs import settings_of
from trainpace.core.errors import Contradiction, TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.execution import Execution
from trainpace.core.intake import read_bytes, toml_of
from trainpace.core.records import from_json
from trainpace.job import JobConditions, Schedule
from trainpace.plan import Change, DataPath, Plan
from trainpace.run.rungs import EXECUTION_KEYS, KEYS, Ladder, Rung, Script, Setup, changed
from trainpace.run.script_files import SCRIPT_STEPS, present
from trainpace.run.slurm_script import SlurmOptions
from trainpace.run.trial import LoaderSettings
from trainpace.workload import ModelSpec

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
