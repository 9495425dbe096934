"""Settings files of other tools.

This module merges them with a request, limits a plan to changes that the files can express, and
writes a plan into them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from trainpace.plan import Change, Plan
    from trainpace.verbs.plan import PlanRequest


NEW = {
    ".json": "DeepSpeed",
    ".yaml": "accelerate",
    ".yml": "accelerate",
    ".sh": "torchrun",
    ".sbatch": "sbatch",
}
COMMAND = "command.sh"
"""File name of a launch command in the diff. It is shown, and never saved."""
PREPARED = "samples prepared offline"
OFFLINE = "trainpace precompute makes them, and the training's code reads them"


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
        files = [
            *configs.read_configs(paths),
            *([configs.parse_command(command)] if command else []),
        ]
        return cls(configs.agreed(files))

    def value(self, name: str) -> Any:
        setting = None if self.combined is None else self.combined.values.get(name)
        return None if setting is None else setting.value

    def pick(self, name: str, option: Any) -> Any:
        """Return the option's value, or else the files'. Raises Contradiction if they differ."""
        stated = self.value(name)
        if option is not None and stated is not None and option != stated:
            setting = self.combined.values[name]
            raise Contradiction(
                f"{name} is {option} on the command line and {stated} in {setting.file}"
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

    @property
    def unread(self) -> list[str]:
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
    texts = {path: read_text(path) for path in request.config}
    return texts | ({COMMAND: request.command + "\n"} if request.command else {})


def kinds_of(new: Sequence[str]) -> dict[str, str]:
    """Return the kind of each new settings file by its name."""
    return {file: NEW[Path(file).suffix] for file in new}


def rewritten(request: PlanRequest, plan: Plan, new: Sequence[str]) -> Rewritten | None:
    """Return the settings files and the `new` ones with all changes of the plan.

    Returns None if there is nothing to change.

    Raises:
        Misuse: The files cannot express all changes.
    """
    if plan.best is None or not (plan.changes or new):
        return None
    texts = texts_of(request)
    end = plan.changes[-1].data if plan.changes else plan.best.choice.data
    now = plan.now.choice.data if plan.now is not None else end
    workers = end.workers if end.workers != now.workers else None
    prepared = {PREPARED: OFFLINE} if end.precomputed and not now.precomputed else {}
    limit_s = 60 * math.ceil(1.2 * plan.best.job_s / 60)  # 20% more than the forecast
    added = configs.new_files(kinds_of(new), plan.end, texts, workers, limit_s)
    wrote = {name for f in added for name in f.wrote}
    left = _left_by_new(added, plan)
    if not plan.changes or not texts:
        left = {name: why for name, why in left.items() if name not in wrote}
        return configs.Rewritten(files=added, left=prepared | left)
    changes = configs.Changes(before=plan.start, after=plan.end, workers=workers)
    files = configs.rewrite(texts, changes)
    _refuse({name: why for name, why in files.left.items() if name not in wrote})
    return configs.Rewritten(files=(*files.files, *added), left=prepared)


def _left_by_new(added: Sequence[configs.Written], plan: Plan) -> dict[str, str]:
    """Return the settings that new files cannot express, with reasons.

    Raises:
        Misuse: A file would contradict the plan.
    """
    wanted = configs.settings_of(plan.end)
    for f in added:
        left = {name: why for name, why in f.left.items() if configs.still_says(f, name, wanted)}
        _refuse({name: f"{f.file}: {why}" for name, why in left.items()})
    return {name: f"{f.file}: {why}" for f in added for name, why in f.left.items()}


def changes_in_code(plan: Plan, files: Rewritten | None) -> list[tuple[int, Change]]:
    """Return the numbered changes that must be made in the training's code.

    These are the changes that the written files do not fully express.
    """
    numbered = list(enumerate(plan.changes, 1))
    if plan.in_code:
        return numbered
    left = {} if files is None else files.left
    found, before, data = [], plan.start, plan.now.choice.data if plan.now is not None else None
    for n, change in numbered:
        differs = {
            name
            for name in EXECUTION_FIELDS
            if getattr(before, name) != getattr(change.execution, name)
        }
        if data is not None and change.data.workers != data.workers:
            differs |= {"dataloader_workers"}
        if change.data.precomputed and not (data and data.precomputed):
            differs |= {PREPARED}
        if differs & left.keys():
            found.append((n, change))
        before, data = change.execution, change.data
    return found


def _refuse(left: dict[str, str]) -> None:
    if left:
        which = "; ".join(f"{name} ({why})" for name, why in left.items())
        raise Misuse(
            f"Nothing was written: none of the files can express {which}.",
            "Fix the setting with `keep`, pass the file that sets it with `config`, or leave `write`"
            " out.",
        )


def save_all(files: Rewritten) -> dict[str, str]:
    """Write the files. Returns {file: backup}, with "" for a new file.

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
    written = [f for f in files.files if f.file != COMMAND or not f.before]
    backups = zip(written, configs.save_all(written), strict=True)
    return {f.file: backup for f, backup in backups if backup is not None}


_DOUBLED = {
    "nnodes": "another number of nodes",
    "nproc_per_node": "another number of GPUs per node",
    "micro_batch": "another micro-batch",
    "accumulation": "another accumulation",
}
_FLAGS = {
    "compile": "torch.compile",
    "channels_last": "channels_last",
    "sequence_parallel": "sequence parallelism",
    "async_tensor_parallel": "asynchronous tensor parallelism",
    "reshard_after_forward": "parameters kept until the backward pass",
}
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
                f"{field} is {size} now, and {why}.",
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
    inexpressible = _Inexpressible(texts, new, start)
    return (*limits, *inexpressible.limits()), inexpressible.why(
        "dataloader_workers", configs.Changes(before=start, after=start, workers=1)
    )


class _Inexpressible:
    """Settings that none of a training's files (old or new) can express, with the reasons."""

    def __init__(self, texts: Mapping[str, str], new: Mapping[str, str], start: Execution) -> None:
        self._texts, self._new, self._start = texts, new, start

    def why(self, field: str, changes: configs.Changes) -> str:
        why = configs.rewrite(self._texts, changes).left.get(field, "")
        if not why or any(
            field in configs.new_file(kind, changes.after, file).wrote
            for file, kind in self._new.items()
        ):
            return ""
        return why

    def limits(self) -> Iterator[Limit]:
        start = self._start
        wider = replace(start, nproc_per_node=2 * start.nproc_per_node)
        for field, title in _DOUBLED.items():
            yield from self._limit(field, title, start, **{field: 2 * getattr(start, field)})
        for field, title in PARALLELISM.items():
            yield from self._limit(field, title, wider, **{field: 2 * getattr(start, field)})
        for precision in EXECUTION_FIELDS["precision"].choices:
            yield from self._limit("precision", precision, start, precision=precision)
        stages = [start.zero_stage]
        for stage in EXECUTION_FIELDS["zero_stage"].choices:
            limits = list(
                self._limit(
                    "zero_stage",
                    f"ZeRO-{stage}" if stage else "no sharding",
                    start,
                    zero_stage=stage,
                )
            )
            stages += [] if limits else [stage]
            yield from limits
        offloads: dict[str, Any] = {
            "zero_stage": max(stages),
            "offload_optimizer": not start.offload_optimizer,
        }
        yield from self._limit("offload_optimizer", "the optimizer's offload", start, **offloads)
        offloads |= {"zero_stage": 3, "offload_parameters": not start.offload_parameters}
        yield from self._limit("offload_parameters", "the parameters' offload", start, **offloads)
        for kind in EXECUTION_FIELDS["activation_checkpointing"].choices:
            title = "no recomputation" if kind == "none" else f"{kind} recomputation"
            yield from self._limit(
                "activation_checkpointing", title, start, activation_checkpointing=kind
            )
        for field, title in _FLAGS.items():
            yield from self._limit(field, title, start, **{field: not getattr(start, field)})
        yield Limit(
            title="virtual stages",
            field="virtual_stages",
            values=(start.virtual_stages,),
            why=configs.NO_KEY,
        )

    def _limit(self, field: str, title: str, before: Execution, **changes: Any) -> Iterator[Limit]:
        """Yield a limit if no file can express the value that `changes` give to a field.

        A count must then keep its current value.
        """
        after = replace(before, **changes)
        now, value = getattr(before, field), getattr(after, field)
        if now != value and (why := self.why(field, configs.Changes(before=before, after=after))):
            choices = EXECUTION_FIELDS[field].choices
            others = tuple(choice for choice in choices if choice != value) if choices else (now,)
            yield Limit(title=title, field=field, values=others, why=why)


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
