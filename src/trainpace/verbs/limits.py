"""What a plan may not choose: what the engine of the training's settings files lacks, and with `write` whatever those files
cannot state. The files' own writers are asked, change by change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from trainpace import configs
from trainpace.core.errors import Contradiction
from trainpace.core.execution import EXECUTION_FIELDS, Execution
from trainpace.plan import PARALLELISM, Limit

_DOUBLED = {
    "nnodes": "another number of nodes",
    "nproc_per_node": "another number of GPUs a node",
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
"""New files beside which no other file may be needed."""


def limits_of(
    texts: Mapping[str, str], new: Mapping[str, str], start: Execution, write: bool
) -> tuple[tuple[Limit, ...], str]:
    """(the limits, why the loader's workers cannot be written, "" where they can). `texts`: file -> text of the settings as they
    are; `new`: file -> the kind of a file to be made.

    Raises Contradiction where the training as it is has what its engine lacks.
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
                "Leave it out, or name the files of another engine.",
            )
    limits = [
        Limit(title=PARALLELISM[field], field=field, values=(1,), why=why)
        for field, why in lacks.items()
    ]
    if not write:
        return tuple(limits), ""
    if not texts:
        return (*limits, *_limits_of_new(new, start)), ""
    untaken = _Untaken(texts, new, start)
    return (*limits, *untaken.limits()), untaken.why(
        "dataloader_workers", configs.Changes(before=start, after=start, workers=1)
    )


class _Untaken:
    """What the files of a training, with those to be made beside them, do not take, and why."""

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
        """The limit on the value that `changes` give a field, if no file takes it. A count then stays as it is."""
        after = replace(before, **changes)
        now, value = getattr(before, field), getattr(after, field)
        if now != value and (why := self.why(field, configs.Changes(before=before, after=after))):
            choices = EXECUTION_FIELDS[field].choices
            others = tuple(choice for choice in choices if choice != value) if choices else (now,)
            yield Limit(title=title, field=field, values=others, why=why)


def _limits_of_new(new: Mapping[str, str], start: Execution) -> Iterator[Limit]:
    """What the files to be made contradict where they stand alone: the rest is for the training's code to say."""
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
