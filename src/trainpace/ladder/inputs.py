"""A ladder from a file of the user's own (`ladder.toml`), or from a plan that `trainpace plan --output` kept."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainpace.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.execution import Execution
from trainpace.ladder.rungs import EXECUTION_KEYS, KEYS, Ladder, Rung, Setup, changed
from trainpace.launch.trial import LoaderSettings
from trainpace.plan import Change, DataPath, Plan
from trainpace.records import from_json, read_bytes
from trainpace.schedule import Schedule

TOP_KEYS = (
    "task", "price_usd_per_hour", "loss_tolerance", "seconds", "warmup_steps", "seed", "device", "allow_global_batch",
    "start", "rung", "job",
)  # fmt: skip
JOB_KEYS = Schedule.__struct_fields__
OF_A_PLAN = tuple(k for k in EXECUTION_KEYS if k not in ("accumulation", "optimizer"))
"""What a plan's changes are told by. Accumulation follows from the rest, and the optimizer stays."""


def read_ladder(path: Path, task: str | None = None, precompute: str = "") -> Ladder:
    """The ladder that a file holds. `task` goes before the file's own; `precompute` names the dataset of a plan's shards.

    Raises UnreadableInput, UnknownName or TrainpaceError, in one sentence that names the file.
    """
    text = read_bytes(path)
    if path.suffix == ".toml":
        return _from_toml(text, path, task)
    if path.suffix != ".json":
        raise UnreadableInput(
            f"{path} is neither a ladder (.toml) nor a plan (.json).", "trainpace plan --output makes one."
        )
    return ladder_of_plan(from_json(text, Plan, str(path)), task, precompute)


def _from_toml(text: bytes, path: Path, task: str | None) -> Ladder:
    try:
        read = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UnreadableInput(f"{path} is not valid TOML ({error}).") from None
    _known(read, TOP_KEYS, f"key of {path.name}")
    start: dict[str, Any] = read.pop("start", {})
    rungs, job = read.pop("rung", []), read.pop("job", None)
    tables = isinstance(start, dict) and isinstance(rungs, list) and isinstance(job, dict | None)
    if not tables or not all(isinstance(r, dict) for r in rungs):
        raise UnreadableInput(f"{path}: [start] and [job] are tables, and each [[rung]] is one.")
    spec = task or _beside(path, str(read.pop("task", "")))
    read.pop("task", None)
    if not spec:
        raise TrainpaceError(f'{path} names no task: task = "FILE.py:FUNCTION", or give --task.')
    _known(start, KEYS, f"setting in [start] of {path.name}")
    _known(job or {}, JOB_KEYS, f"key in [job] of {path.name}")
    if not rungs:
        raise TrainpaceError(f"{path} has no [[rung]] to try.")
    if "shards" in start:
        start["shards"] = _beside_folder(path, start["shards"])
    if "global_batch" not in start:
        start = {"accumulation": 1, "micro_batch": 1, **start}
    try:
        begin = changed(Setup(task=spec, execution=Execution()), start, allow_global_batch=True)
        return msgspec.convert(
            read | {"start": msgspec.to_builtins(begin), "rungs": [msgspec.to_builtins(_rung(r, path)) for r in rungs],
                    "job": job},
            Ladder,
        )  # fmt: skip
    except msgspec.ValidationError as error:
        raise UnreadableInput(f"{path}: {error}.") from None
    except UnknownName:
        raise
    except TrainpaceError as error:
        raise TrainpaceError(f"{path}: {error.message}", error.hint) from None


def _rung(table: dict[str, Any], path: Path) -> Rung:
    _known(table, ("title", "precompute", *KEYS), f"setting in [[rung]] of {path.name}")
    changes = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items() if k not in ("title", "precompute")}
    if "shards" in changes:
        changes["shards"] = _beside_folder(path, changes["shards"])
    precompute = _beside(path, str(table.get("precompute", "")))
    title = table.get("title") or ", ".join(f"{k} {v}" for k, v in changes.items()) or "precomputed shards"
    return Rung(title=str(title), changes=changes, precompute=precompute)


def ladder_of_plan(plan: Plan, task: str | None = None, precompute: str = "") -> Ladder:
    """A plan's changes as rungs. Raises TrainpaceError where the plan has no changes, or no model is named."""
    spec = task or plan.model
    if not spec:
        raise TrainpaceError("the plan names no model.", "Give --task FILE.py:FUNCTION, or make the plan again.")
    if not plan.changes:
        raise TrainpaceError("the plan has no changes to carry out.", plan.reason)
    data = plan.now.choice.data if plan.now is not None else DataPath()
    start = Setup(task=spec, execution=plan.start, loader=LoaderSettings(workers=data.workers or 0))
    rungs, before = [], (plan.start, data)
    for change in plan.changes:
        rungs.append(_rung_of_change(change, *before, precompute))
        before = change.execution, change.data
    batches = {change.execution.global_batch for change in plan.changes} - {plan.start.global_batch}
    return Ladder(start=start, rungs=tuple(rungs), device="cuda", allow_global_batch=bool(batches))


def _rung_of_change(change: Change, execution: Execution, data: DataPath, precompute: str) -> Rung:
    after = change.execution
    changes: dict[str, Any] = {
        key: getattr(after, key) for key in OF_A_PLAN if getattr(after, key) != getattr(execution, key)
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


def fingerprint(spec: str) -> str:
    """A hash of the Python files in the folder of a task's file, "" for other models: measurements of other code do not count."""
    import hashlib

    file, _, name = spec.rpartition(":")
    if not file.endswith(".py"):
        return ""
    sources = {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(file).absolute().parent.glob("*.py"))
    }
    if Path(file).name not in sources:
        raise UnreadableInput(f"cannot read {file}: no such file.")
    return hashlib.sha256(json.dumps([name, sources]).encode()).hexdigest()[:16]


def _known(table: Mapping[str, Any], keys: Iterable[str], what: str) -> None:
    for key in table:
        if key not in keys:
            raise UnknownName(what, key, keys)


def _beside(path: Path, spec: str) -> str:
    """FILE.py:NAME is meant from the ladder's own folder, wherever the command is called."""
    file, colon, name = spec.rpartition(":")
    return f"{path.parent / file}{colon}{name}" if file.endswith(".py") else spec


def _beside_folder(path: Path, folder: Any) -> str:
    return str(path.parent / str(folder))
