"""The public journal: packaged measurements of others, filtered as own runs are, and beside own runs in comparisons."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from trainpace.core.catalogue_reader import catalogue_name
from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.execution import PRECISIONS, Execution
from trainpace.core.records import Record
from trainpace.forecast import PublicRun, public_runs, read_parallelism
from trainpace.journal.comparison import Comparison, Difference, compare
from trainpace.journal.entry import Entry
from trainpace.journal.exchange import UNKNOWN
from trainpace.journal.query import Query, names_of
from trainpace.journal.store import Journal
from trainpace.workload import ModelSpec

PUBLIC = "public:"
"""Before the id of a public run."""
MINE = "mine"
"""In a comparison: the newest own run that is most like the other side."""


class PublicQuery(Record):
    """Filters that all must hold, as in `Query`. `source` matches a part in any case, and so do `model` and `device`, and
    `optimizer` whole words, unless `exact`. Sources spell differently: blanks, "-" and "_" make no difference in a model or an
    optimizer."""

    model: str = ""
    device: str = ""
    exact: bool = False
    kind: str = ""
    precision: str = ""
    optimizer: str = ""
    micro_batch: int | None = None
    mode: str = ""
    source: str = ""
    text: str = ""


def matching(query: PublicQuery, runs: Sequence[PublicRun] | None = None) -> list[PublicRun]:
    """The public runs that fulfil a query, in their order: by collection, model, card and batch. `kind`: of model."""
    q = query
    parts = {name: getattr(q, name).casefold() for name in ("source", "text")}
    names = {"model": _folded(q.model), "device": q.device.casefold()}
    optimizer = _spaced(q.optimizer)
    same = {"model_kind": q.kind, "precision": q.precision, "mode": q.mode}
    same = {name: value for name, value in same.items() if value}

    def fulfils(run: PublicRun) -> bool:
        for name, part in names.items():
            own = _folded(run.model) if name == "model" else run.device.casefold()
            if part and not (part == own if q.exact else part in own):
                return False
        own = _spaced(run.optimizer or "")
        if q.optimizer and not (optimizer == own if q.exact else optimizer and optimizer in own):
            return False
        return (
            all(getattr(run, name) == value for name, value in same.items())
            and (q.micro_batch is None or run.micro_batch == q.micro_batch)
            and parts["source"] in f"{run.source} {run.collection}".casefold()
            and parts["text"]
            in " ".join((run.model, run.device, run.source, run.notes, run.software)).casefold()
        )

    return [run for run in (public_runs() if runs is None else runs) if fulfils(run)]


def _folded(name: str) -> str:
    """ResNet-50, resnet_50 and resnet50 are one."""
    return re.sub(r"[-_\s]", "", name.casefold()) or name.casefold()


def _spaced(name: str) -> str:
    """The words of a name between blanks, so that "sgd" is a part of "SGD momentum" but "adam" none of "AdamW"."""
    words = re.findall(r"[^\W_]+", name.casefold())
    return f" {' '.join(words)} " if words else ""


def public_query(query: Query, kind: str = "") -> PublicQuery:
    """The same filters on public runs. Raises TrainpaceError for one that only own runs have."""
    for name in ("outcome", "sweep", "workload_key", "since", "kind"):
        if getattr(query, name):
            raise TrainpaceError(f"public runs have no `{name}` to be filtered by.")
    shared = {
        name: getattr(query, name) for name in PublicQuery.__struct_fields__ if hasattr(query, name)
    }
    return PublicQuery(**{**shared, "kind": kind})


def is_public(id_: str) -> bool:
    return id_.strip().lower().startswith(PUBLIC)


def public_run(id_: str) -> PublicRun:
    """The public run with an id, with or without ``public:``; its first digits are enough. Raises UnknownName, or TrainpaceError
    where several match."""
    wanted = id_.strip().lower().removeprefix(PUBLIC)
    found = (
        [run for run in public_runs() if run.id.startswith(wanted)]
        if re.fullmatch("[0-9a-f]{1,10}", wanted)
        else []
    )
    if not found:
        raise UnknownName("public run", id_, (), "trainpace journal list --public shows their ids.")
    if len(found) > 1:
        raise TrainpaceError(
            f"several public runs start with {wanted}.", "Give more digits of the id."
        )
    return found[0]


def compared(journal: Journal, a: str, b: str) -> Comparison:
    """Two sides compared, each a run or sweep of the journal, ``public:ID``, or ``mine``."""
    sides: list[list[Entry] | None] = [
        None if side.strip().lower() == MINE else _side(journal, side) for side in (a, b)
    ]
    for i, other in ((0, sides[1]), (1, sides[0])):
        if sides[i] is None:
            if other is None:
                raise TrainpaceError(
                    f"{MINE!r} stands for the own run most like the other side: name that one."
                )
            sides[i] = [_mine(journal, other[0])]
    left, right = ([] if side is None else side for side in sides)
    made = compare(left, right)
    stated = [_run_named(a), _run_named(b)]
    public = {entry_of_public(run).id: f"{PUBLIC}{run.id}" for run in stated if run is not None}
    made = replace(
        made,
        a=tuple(public.get(id_, id_) for id_ in made.a),
        b=tuple(public.get(id_, id_) for id_ in made.b),
    )
    if not public or len(left) != 1 or len(right) != 1:
        return made
    return _with_global_batch(
        made, _global_batch(stated[0], left[0]), _global_batch(stated[1], right[0])
    )


def _global_batch(run: PublicRun | None, entry: Entry) -> int:
    """Samples a step: of a public run as its source states them, which no accumulation or parallelism that is told may give."""
    return (
        run.global_batch if run is not None and run.global_batch else entry.execution.global_batch
    )


def _with_global_batch(made: Comparison, a: int, b: int) -> Comparison:
    """The comparison with the samples that a step of either side took, where they differ, and with the throughputs of these."""
    conditions = (
        *made.conditions,
        *([Difference(name="global_batch", a=str(a), b=str(b))] if a != b else []),
    )
    pace = made.samples_per_second
    if made.ratios:
        (ratio,) = made.ratios
        pace = Difference(name="samples per second", a=1e3 * a / ratio.a_ms, b=1e3 * b / ratio.b_ms)
    return replace(made, conditions=conditions, samples_per_second=pace)


def _run_named(id_: str) -> PublicRun | None:
    return public_run(id_) if is_public(id_) else None


def _side(journal: Journal, id_: str) -> list[Entry]:
    if not is_public(id_):
        return journal.run_or_sweep(id_)
    run = public_run(id_)
    if not run.micro_batch:
        raise TrainpaceError(
            f"the source of {PUBLIC}{run.id} states no batch, so that its step can be compared with"
            " none."
        )
    return [entry_of_public(run)]


def _mine(journal: Journal, other: Entry) -> Entry:
    """The newest own run of the same model, best with samples of the same size, on the same card, at the same batch, in the same
    precision."""
    plain = _folded(ModelSpec.of(other.model).plain_name)
    names = [
        name
        for name in names_of(journal, "model") or ()
        if _folded(ModelSpec.of(name).plain_name) == plain
    ]
    asked = (Query(model=name, exact=True, outcome="ok", mode=other.mode) for name in names)
    runs = [run for query in asked for run in journal.find(query, limit=None) if run.id != other.id]
    runs.sort(key=lambda run: (run.created_at, run.id), reverse=True)
    if not runs:
        raise TrainpaceError(
            f"the journal holds no run of {other.model} to compare with.",
            "Name one: trainpace journal list.",
        )

    def unlike(run: Entry) -> tuple[int, bool, bool, bool]:
        x, y = run.execution, other.execution
        return (
            _other_size(run, other),
            catalogue_name(run.device) != other.device,
            x.micro_batch != y.micro_batch,
            x.precision != y.precision,
        )

    return min(runs, key=unlike)  # the newest of those that are alike


def _other_size(a: Entry, b: Entry) -> int:
    """0 for samples of the same size, 1 where a run does not state it, as at a model's usual size, 2 for others."""
    sizes = (a.image_size, b.image_size), (a.sequence_length, b.sequence_length)
    return max(0 if one == other else 1 if None in (one, other) else 2 for one, other in sizes)


def entry_of_public(run: PublicRun) -> Entry:
    """A public run as one of the journal's, for comparisons; it is never stored."""
    notes = f"{run.source}: {run.url}"
    software = {"framework": run.software} if run.software else {}
    return Entry(
        id=run.id.ljust(32, "0"),
        created_at=_time(run.date),
        kind="import",
        outcome="ok",
        model=run.model,
        device=run.device,
        execution=_execution(run),
        num_devices=run.gpus,
        sequence_length=run.sequence_length,
        image_size=run.image_size,
        mode=run.mode,
        step_time_ms=run.step_time_ms,
        peak_memory_gib=run.peak_memory_gib,
        forecast_ms=run.forecast_ms,
        forecast_low_ms=run.low_ms,
        forecast_high_ms=run.high_ms,
        environment=software,
        notes=notes,
        source=run.source,
    )


def _execution(run: PublicRun) -> Execution:
    sizes: dict[str, Any] = {
        "micro_batch": max(1, run.micro_batch),
        "accumulation": max(1, run.accumulation),
    }
    per_node = max(1, run.gpus // max(1, run.nodes))
    try:
        execution = replace(
            read_parallelism(run.parallelism or ""),
            nnodes=max(1, run.nodes),
            nproc_per_node=per_node,
        )
    except TrainpaceError:
        execution = Execution()
    precision: Any = run.precision if run.precision in PRECISIONS else run.precision or UNKNOWN
    return replace(
        execution,
        **sizes,
        precision=precision,
        optimizer=run.optimizer or ("none" if run.mode != "train" else UNKNOWN),
        compile=run.compile in ("compile", "xla"),
        channels_last=run.memory_format == "nhwc",
    )


def _time(date: str | None) -> str:
    """The first moment of a date that may be a year or a month alone."""
    parts = re.fullmatch(r"(\d{4})(?:-(\d\d))?(?:-(\d\d))?.*", date or "")
    year, month, day = (
        (parts[1], parts[2] or "01", parts[3] or "01") if parts else ("1970", "01", "01")
    )
    return f"{year}-{month}-{day}T00:00:00.000000Z"


class Accuracy(Record):
    """Errors of `n` forecasts in per cent of the measured step. `inside_pct`: of measured times that lie in their interval."""

    n: int
    mean_pct: float | None
    median_pct: float | None
    inside_pct: float | None


class AccuracyLine(Record):
    """Runs that no constant was fitted on, which tell how far to trust a forecast, and those that some were, apart."""

    name: str
    not_in_fit: Accuracy
    in_fit: Accuracy


def accuracy(name: str, runs: Sequence[PublicRun]) -> AccuracyLine:
    """Of the runs that have a forecast."""
    apart = [
        [run for run in runs if run.forecast_ms is not None and run.in_fit is in_fit]
        for in_fit in (False, True)
    ]
    return AccuracyLine(name=name, not_in_fit=_accuracy(apart[0]), in_fit=_accuracy(apart[1]))


def accuracy_by(runs: Sequence[PublicRun], field: str) -> tuple[AccuracyLine, ...]:
    """Lines by a field of `PublicRun`, by name; what has no forecast has no line."""
    groups: dict[str, list[PublicRun]] = {}
    for run in runs:
        if run.forecast_ms is not None:
            groups.setdefault(getattr(run, field), []).append(run)
    return tuple(accuracy(name, groups[name]) for name in sorted(groups, key=str.casefold))


def _accuracy(runs: Sequence[PublicRun]) -> Accuracy:
    errors = [abs(error) for run in runs if (error := run.error_pct) is not None]
    inside = [
        run.low_ms <= run.step_time_ms <= run.high_ms
        for run in runs
        if run.low_ms is not None and run.high_ms is not None
    ]
    return Accuracy(
        n=len(errors),
        mean_pct=statistics.fmean(errors) if errors else None,
        median_pct=statistics.median(errors) if errors else None,
        inside_pct=100 * sum(inside) / len(inside) if inside else None,
    )
