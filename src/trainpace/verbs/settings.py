"""Settings files of other tools.

This module merges them with a request, limits a plan to changes that the files can express, and
writes a plan into them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from trainpace import configs
from trainpace.core.errors import Contradiction
from trainpace.core.execution import EXECUTION_FIELDS, Execution
from trainpace.core.intake import read_text
from trainpace.plan import PARALLELISM, Limit
from trainpace.verbs.request import Misuse

if TYPE_CHECKING:
    from trainpace.configs import Rewritten
    from trainpace.job import DataPath
    from trainpace.plan import Change, Plan
    from trainpace.verbs.plan import PlanRequest


KIND_OF_NEW_FILE = {
    ".json": "DeepSpeed",
    ".yaml": "accelerate",
    ".yml": "accelerate",
    ".sh": "torchrun",
    ".sbatch": "sbatch",
}
"""Kind of a new settings file by its suffix."""
COMMAND = "command.sh"
"""File name under which the user's launch command is shown in the diff. It is not saved."""
PREPARED = "samples prepared offline"
OFFLINE = "run trainpace precompute to make them, and change the training's code to read them"


class SettingsSource(NamedTuple):
    """The settings that the user's files agree on. `combined` is None if there are no files."""

    combined: Any

    @classmethod
    def read(cls, paths: tuple[str, ...], command: str | None) -> SettingsSource:
        """Read and cross-check the files.

        Raises:
            Contradiction: The files disagree. The message lists every disagreement.
        """
        if not paths and not command:
            return cls(None)
        return cls(configs.agreed(configs.read_configs(paths, command)))

    def value(self, name: str) -> Any:
        setting = None if self.combined is None else self.combined.values.get(name)
        return None if setting is None else setting.value

    def pick(self, name: str, option: Any) -> Any:
        """Return the option's value, or else the files'. Raises Contradiction if they differ."""
        stated = self.value(name)
        if option is not None and stated is not None and option != stated:
            setting = self.combined.values[name]
            raise Contradiction(
                f"`{name}` is {option} on the command line and {stated} in {setting.file}"
                f" ({setting.key}).",
                "Leave the option out, or change the file.",
            )
        return stated if option is None else option

    def world(
        self, nnodes: int | None, nproc_per_node: int | None
    ) -> tuple[int | None, int | None]:
        """Return (nodes, processes per node). If a file has only the total, one node is assumed."""
        nodes, processes = self.pick("nnodes", nnodes), self.pick("nproc_per_node", nproc_per_node)
        total = self.value("world_size")
        if total is None:
            return nodes, processes
        if nodes and processes and nodes * processes != total:
            raise Contradiction(
                f"world size {total} in the files is not {nodes} nodes x {processes} processes."
            )
        divisor = processes or nodes or 1
        if total % divisor:
            raise Contradiction(f"world size {total} in the files cannot be split by {divisor}.")
        return (total // divisor, processes) if processes else (divisor, total // divisor)

    def check_counts(self, options: Mapping[str, Any]) -> None:
        """Cross-check the counts of files and options. One process is assumed if none is stated.

        Raises:
            Contradiction: They give another global batch than stated. The message names their
                files.
        """
        if self.combined is not None:
            given = {
                name: configs.Setting(name=cast(Any, name), value=value, file="option", key=name)
                for name, value in options.items()
                if value is not None
            }
            configs.check_counts(given | self.combined.values)

    @property
    def unread_notes(self) -> list[str]:
        """Return notes about settings in Python code that could not be read."""
        notes = () if self.combined is None else self.combined.notes
        return [
            f"note: {note.file}: {note.text}"
            for note in notes
            if configs.is_python(note.file) and note.severity == "warning"
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the settings and notes for a JSON answer."""
        if self.combined is None:
            return {}
        notes = [msgspec.to_builtins(note) for note in self.combined.notes]
        settings = {name: msgspec.to_builtins(s) for name, s in self.combined.values.items()}
        return {"settings": settings, "notes_on_files": notes}


def texts_of(request: PlanRequest) -> dict[str, str]:
    """Return the text of each settings file of a request."""
    files = configs.read_configs(request.config, request.command)
    texts = {file.file: read_text(file.file) for file in files if file.file != "command"}
    return texts | ({COMMAND: request.command + "\n"} if request.command else {})


def kinds_of(new: Sequence[str]) -> dict[str, str]:
    """Return the kind of each new settings file by its name."""
    return {file: KIND_OF_NEW_FILE[Path(file).suffix] for file in new}


def rewritten(request: PlanRequest, plan: Plan, new: Sequence[str]) -> Rewritten | None:
    """Return the settings files and the `new` ones with all changes of the plan.

    If no old file has to change, `left` of the result has what the new files cannot state. If one
    has to, the old and new files together must state each change. Samples prepared offline are in
    `left` in both cases. Returns None if there is nothing to change.

    Raises:
        Misuse: The files cannot express all changes.
    """
    if plan.best is None or not (plan.changes or new):
        return None
    texts = texts_of(request)
    workers, prepared = _data_changes(plan, plan.best.choice.data)
    limit_s = 60 * math.ceil(1.2 * plan.best.job_s / 60)  # 20% more than the forecast
    added = configs.new_files(kinds_of(new), plan.end, texts, workers, limit_s)
    wrote = {name for f in added for name in f.wrote}
    left = _left_by_new(added, plan)
    if not plan.changes or not texts:  # No old file has to change.
        left = {name: why for name, why in left.items() if name not in wrote}
        return configs.Rewritten(files=added, left=prepared | left)
    changes = configs.Changes(before=plan.start, after=plan.end, workers=workers)
    files = configs.rewrite(texts, changes)
    _refuse({name: why for name, why in files.left.items() if name not in wrote})
    return configs.Rewritten(files=(*files.files, *added), left=prepared)


def _data_changes(plan: Plan, best: DataPath) -> tuple[int | None, dict[str, str]]:
    """Return the new number of loader workers, and what the training's code must do.

    The number is None if it does not change.
    """
    end = plan.changes[-1].data if plan.changes else best
    now = plan.now.choice.data if plan.now is not None else end
    workers = end.workers if end.workers != now.workers else None
    return workers, {PREPARED: OFFLINE} if end.precomputed and not now.precomputed else {}


def _left_by_new(added: Sequence[configs.Written], plan: Plan) -> dict[str, str]:
    """Return the settings that new files cannot express, with reasons.

    Raises:
        Misuse: A file would contradict the plan.
    """
    wanted = configs.settings_of(plan.end)
    for f in added:
        # A template may state a value that contradicts the plan.
        left = {name: why for name, why in f.left.items() if configs.still_says(f, name, wanted)}
        _refuse({name: f"{f.file}: {why}" for name, why in left.items()})
    return {name: f"{f.file}: {why}" for f in added for name, why in f.left.items()}


def changes_in_code(plan: Plan, files: Rewritten | None) -> list[tuple[int, Change]]:
    """Return the numbered changes that must be made in the training's code.

    These are the changes that the written files do not fully express.
    """
    left = {} if files is None else files.left
    found, before = [], _settings(plan.start, plan.now.choice.data if plan.now else None)
    for n, change in enumerate(plan.changes, 1):
        after = _settings(change.execution, change.data)
        if plan.in_code or any(before[name] != after[name] for name in left if name in after):
            found.append((n, change))
        before = after
    return found


def _settings(execution: Execution, data: DataPath | None) -> dict[str, Any]:
    values = {name: getattr(execution, name) for name in EXECUTION_FIELDS}
    if data is None:
        return values | {"dataloader_workers": None, PREPARED: False}
    return values | {"dataloader_workers": data.workers, PREPARED: data.precomputed}


def _refuse(left: dict[str, str]) -> None:
    if left:
        which = "; ".join(f"`{name}` ({why})" for name, why in left.items())
        raise Misuse(
            f"Nothing was written: none of the files can express {which}.",
            "Keep the setting unchanged with `keep`, pass the file that sets it with `config`, or"
            " leave `write` out.",
        )


def save_all(files: Rewritten) -> dict[str, str]:
    """Write the files. Returns the backup of each written file, or "" if the file is new.

    Raises:
        Contradiction: The files disagree. Nothing is written then.
    """
    clashes = configs.combine([configs.parse_config(f.text, f.file) for f in files.files]).clashes
    if clashes:
        text = " ".join(clash.text for clash in clashes)
        raise Contradiction(
            f"Nothing was written, because the files would contradict each other: {text}",
            "Change the rest by hand first.",
        )
    # The user's launch command has an old text, unlike a new file of the same name.
    written = [f for f in files.files if f.file != COMMAND or not f.before]
    backups = zip(written, configs.save_all(written), strict=True)
    return {f.file: backup for f, backup in backups if backup is not None}


_TITLES = {
    "nnodes": "another number of nodes",
    "nproc_per_node": "another number of GPUs per node",
    "micro_batch": "another micro-batch",
    "accumulation": "another accumulation",
    **PARALLELISM,
    "precision": "{}",
    "zero_stage": "ZeRO-{}",
    "offload_optimizer": "the optimizer's offload",
    "offload_parameters": "the parameters' offload",
    "activation_checkpointing": "{} recomputation",
    "compile": "torch.compile",
    "channels_last": "channels_last",
    "sequence_parallel": "sequence parallelism",
    "async_tensor_parallel": "asynchronous tensor parallelism",
    "reshard_after_forward": "parameters kept until the backward pass",
}
"""Name of a change of each setting that a plan may change. {} stands for the new value."""
_OFF = {"ZeRO-0": "no sharding", "none recomputation": "no recomputation"}
_ALONE = ("DeepSpeed", "accelerate")
"""Kinds of new files that work without another file."""


def limits_of(
    texts: Mapping[str, str], new: Mapping[str, str], start: Execution, write: bool
) -> tuple[tuple[Limit, ...], str]:
    """Return the limits that settings files impose on a plan.

    Args:
        texts: Current text of each settings file.
        new: Kind of each new file.
        start: The current execution.
        write: True if the plan will be written into the files.

    Returns:
        The limits, and the reason why the number of loader workers cannot be written ("" if it
            can).

    Raises:
        Contradiction: The current training uses a feature that its engine does not have.
    """
    lacks = {
        field: f"{file}: {why}"
        for file, text in texts.items()
        for field, why in configs.lacking(text, file).items()
    }
    for field, why in lacks.items():
        if (size := getattr(start, field)) > 1:
            raise Contradiction(
                f"`{field}` is {size} now, and {why}.",
                "Leave it out, or give the files of another engine.",
            )
    limits = [
        Limit(title=PARALLELISM[field], field=field, values=(1,), why=why)
        for field, why in lacks.items()
    ]
    if not write:
        return tuple(limits), ""
    if not texts:
        return (*limits, *_limits_of_new(new, start)), ""

    # Any number of workers shows whether the files can state one.
    workers = configs.Changes(before=start, after=start, workers=1)
    fixed_workers = _why_not_written("dataloader_workers", workers, texts, new)
    return (*limits, *_inexpressible(texts, new, start)), fixed_workers


def _why_not_written(
    field: str, changes: configs.Changes, texts: Mapping[str, str], new: Mapping[str, str]
) -> str:
    """Return why neither an old nor a new file can express a setting, or "" if one can."""
    why = configs.rewrite(texts, changes).left.get(field, "")
    made = (configs.new_file(kind, changes.after, file).wrote for file, kind in new.items())
    return "" if why and any(field in wrote for wrote in made) else why


def _inexpressible(
    texts: Mapping[str, str], new: Mapping[str, str], start: Execution
) -> Iterator[Limit]:
    """Yield a limit for each value of a setting that no file can express.

    A setting without a list of choices is tried with one other value, such as twice a count. If no
    file can express that value, the setting must keep its current one.
    """
    # Twice the processes, so that each parallelism can double.
    wider = replace(start, nproc_per_node=2 * start.nproc_per_node)
    stage = start.zero_stage  # Becomes the highest stage that the files can express.
    for field, title in _TITLES.items():
        now, choices = getattr(start, field), EXECUTION_FIELDS[field].choices
        values = choices or (not now if isinstance(now, bool) else 2 * now,)
        for value in (value for value in values if value != now):
            before = wider if field in PARALLELISM else start
            needed: dict[str, Any] = {}  # Settings that offloading depends on.
            if field == "offload_optimizer":
                needed = {"zero_stage": stage}
            if field == "offload_parameters":
                needed = {"zero_stage": 3, "offload_optimizer": not start.offload_optimizer}
            changes = configs.Changes(
                before=before, after=replace(before, **needed, **{field: value})
            )
            if why := _why_not_written(field, changes, texts, new):
                others = tuple(choice for choice in choices if choice != value) or (now,)
                name = title.format(value)
                yield Limit(title=_OFF.get(name, name), field=field, values=others, why=why)
            elif field == "zero_stage":
                stage = max(stage, value)
    yield Limit(
        title="virtual stages",
        field="virtual_stages",
        values=(start.virtual_stages,),
        why=configs.NO_KEY,
    )


def _limits_of_new(new: Mapping[str, str], start: Execution) -> Iterator[Limit]:
    """Yield the limits of new files that work alone. The training's code sets everything else."""
    wider = replace(start, nproc_per_node=2 * start.nproc_per_node)
    for file, kind in new.items():
        if kind not in _ALONE:
            continue
        for field, title in PARALLELISM.items():
            after = replace(wider, **{field: 2 * getattr(start, field)})
            if why := configs.new_file(kind, after, file).left.get(field):
                yield Limit(
                    title=title, field=field, values=(getattr(start, field),), why=f"{file}: {why}"
                )
