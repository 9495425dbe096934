"""Comparisons of measured runs: with each other, with their forecasts, and with public runs."""

from __future__ import annotations

import math
import os
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict, replace

from trainpace.core.errors import Contradiction, TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.execution import OPTIMIZERS, PRECISIONS, Execution, optimizer_called
from trainpace.core.hardware import catalogue_name
from trainpace.core.outcome import STEP_PARTS, Interval
from trainpace.core.records import Record
from trainpace.core.stats import noise_of, repeat_interval
from trainpace.forecast import PublicRun, public_runs, read_parallelism
from trainpace.journal.entry import UNKNOWN, Entry, new_id, now_utc, shared_fields
from trainpace.journal.knowledge import middle_run
from trainpace.journal.store import Journal, Query, names_of
from trainpace.workload import ModelSpec

if TYPE_CHECKING:
    from trainpace.watch import Recording

TOLERANCE = 0.05
"""Default allowed slowdown, as a share of the step time.

Step times differ by a few percent between processes, which is more than within one process.
"""
_CONDITIONS = (
    "model device num_devices sequence_length image_size mode loss seed commit workload_key".split()
)
_MEMORY = ("peak_memory_gib", "reserved_memory_gib")


class Ratio(Record):
    """Step time of B divided by step time of A, with its interval if both runs have one.

    `beyond_noise` is True if the interval excludes 1. Steps within one process vary less than runs
    on different days, so a ratio near 1 beyond the noise may still be chance.
    """

    batch: int
    a_ms: float
    b_ms: float
    ratio: float
    low: float | None
    high: float | None
    beyond_noise: bool | None


class Difference(Record):
    """Value of one property of A and of B: a condition, a part of the step in ms, or memory in GiB.

    A missing value is "".
    """

    name: str
    a: str | float
    b: str | float


class Comparison(Record):
    """Comparison of A and B. Each is a run, or a sweep with one or more entries per batch size.

    `ratios` has one item per micro-batch size that both have. `samples_per_second` compares the
    best batch of each side.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    conditions: tuple[Difference, ...]
    parts_ms: tuple[Difference, ...]
    memory_gib: tuple[Difference, ...]
    ratios: tuple[Ratio, ...]
    samples_per_second: Difference | None
    median_ratio: float | None


def compare(a: Sequence[Entry], b: Sequence[Entry]) -> Comparison:
    """Compare two runs, or the runs of two sweeps.

    For each batch size of a sweep, the middle run counts, with the interval of the sweep's repeats.
    """
    single = len(a) == len(b) == 1
    pairs, intervals = ([(a[0], b[0])], {}) if single else _same_batch(_by_batch(a), _by_batch(b))
    ratios = [ratio for pair in pairs if (ratio := ratio_of(*pair, intervals)) is not None]
    return Comparison(
        a=tuple(entry.id for entry in a),
        b=tuple(entry.id for entry in b),
        conditions=_differences(_facts(a[0], single), _facts(b[0], single)),
        parts_ms=_side_by_side(a[0].step, b[0].step, STEP_PARTS, "_ms") if single else (),
        memory_gib=_side_by_side(a[0], b[0], _MEMORY, "_memory_gib") if single else (),
        ratios=tuple(ratios),
        samples_per_second=_rates(_best_rate(a), _best_rate(b)),
        median_ratio=statistics.median(ratio.ratio for ratio in ratios) if ratios else None,
    )


def _best_rate(side: Sequence[Entry]) -> float:
    return max(entry.samples_per_second or 0.0 for entry in side)


def _rates(a: float, b: float) -> Difference | None:
    return Difference(name="samples per second", a=a, b=b) if a and b else None


def ratio_of(a: Entry, b: Entry, intervals: Mapping[str, Interval] | None = None) -> Ratio | None:
    """Return step time B / step time A, or None if one is missing.

    `intervals` (run id -> interval) override the intervals of the runs.
    """
    if not a.step_time_ms or not b.step_time_ms:
        return None
    one, other = ((intervals or {}).get(entry.id, entry.interval_ms) for entry in (a, b))
    return ratio_between(a.step_time_ms, one, b.step_time_ms, other, b.execution.micro_batch)


def ratio_between(
    a_ms: float,
    a_interval: Interval | None,
    b_ms: float,
    b_interval: Interval | None,
    batch: int = 0,
) -> Ratio:
    """Return the ratio B / A and its interval.

    The two intervals are independent, so their half-widths in logarithms add in squares.
    """
    ratio = b_ms / a_ms
    low = high = None
    if a_interval and b_interval and a_interval.low > 0 and b_interval.low > 0:
        down = math.hypot(_log(b_ms, b_interval.low), _log(a_interval.high, a_ms))
        up = math.hypot(_log(b_interval.high, b_ms), _log(a_ms, a_interval.low))
        low, high = ratio * math.exp(-down), ratio * math.exp(up)
    return Ratio(
        batch=batch,
        a_ms=a_ms,
        b_ms=b_ms,
        ratio=ratio,
        low=low,
        high=high,
        beyond_noise=None if low is None or high is None else not low <= 1 <= high,
    )


def _log(larger: float, smaller: float) -> float:
    return max(0.0, math.log(larger / smaller))


def _by_batch(side: Sequence[Entry]) -> dict[int, list[Entry]]:
    some: dict[int, list[Entry]] = {}
    for entry in side:
        if entry.step_time_ms:
            some.setdefault(entry.execution.micro_batch, []).append(entry)
    return some


def _same_batch(
    a: Mapping[int, Sequence[Entry]], b: Mapping[int, Sequence[Entry]]
) -> tuple[list[tuple[Entry, Entry]], dict[str, Interval]]:
    """Return the middle runs of each common batch size, and the intervals by run id."""
    sizes = sorted(a.keys() & b.keys())
    pairs = [(middle_run(a[batch]), middle_run(b[batch])) for batch in sizes]
    return pairs, _repeat_intervals(a) | _repeat_intervals(b)


def _repeat_intervals(side: Mapping[int, Sequence[Entry]]) -> dict[str, Interval]:
    """Return the interval for one more run of each batch size, by the id of its middle run."""
    times = {
        batch: [entry.step_time_ms for entry in some if entry.step_time_ms]
        for batch, some in side.items()
    }
    noise = noise_of(times)
    if noise is None:
        return {}
    return {middle_run(side[batch]).id: repeat_interval(times[batch], noise) for batch in side}


def _facts(entry: Entry, single: bool) -> dict[str, str]:
    """Return the conditions of a run by name. Those of a sweep have no batch size and outcome."""
    facts: dict[str, Any] = {name: getattr(entry, name) for name in _CONDITIONS}
    facts |= {"outcome": entry.outcome} | asdict(entry.execution)
    facts |= {f"environment: {key}": value for key, value in entry.environment.items()}
    if not single:
        del facts["outcome"], facts["micro_batch"]
    return {name: "" if value is None else str(value) for name, value in facts.items()}


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[Difference, ...]:
    pairs = [(name, a.get(name, ""), b.get(name, "")) for name in {**a, **b}]
    return tuple(Difference(name=name, a=x, b=y) for name, x, y in pairs if x != y)


def _side_by_side(
    a: object, b: object, names: Iterable[str], suffix: str
) -> tuple[Difference, ...]:
    """Return the numbers that both sides have, unless both are 0. Names lose their suffix."""
    pairs = [(name, getattr(a, name, None), getattr(b, name, None)) for name in names]
    return tuple(
        Difference(name=name.removesuffix(suffix), a=left, b=right)
        for name, left, right in pairs
        if left is not None and right is not None and (left or right)
    )


class Pace(Record):
    """Speed of a run: the median step of its slowest rank, with an interval.

    `samples` is the number of samples per step over all ranks, or 0 if it is unknown.
    """

    run: str
    step_ms: float
    interval_ms: Interval | None
    samples: float
    ranks: int


class Guarded(Record):
    """Comparison of a run's pace with a baseline.

    `regressed` is True if the lower end of the ratio's interval is above 1 + tolerance. Without an
    interval, the ratio itself is used.
    """

    baseline: Pace
    now: Pace
    ratio: Ratio
    tolerance: float
    regressed: bool


def pace_of_recording(recording: Recording, run: str) -> Pace:
    """Return the pace of a recording.

    Raises:
        UnreadableInput: If the recording has no training steps.
    """
    if not recording.ranks:
        raise UnreadableInput(f"{run} contains no training steps: {recording.seen}")
    slowest = max(recording.ranks, key=lambda r: r.median_ms)
    interval = Interval(
        low=slowest.median_ms_low,
        high=slowest.median_ms_high,
        coverage=0.9,
        basis="medians of blocks of steps",
    )
    samples = sum(r.samples_per_step for r in recording.ranks)
    return Pace(
        run=run,
        step_ms=slowest.median_ms,
        interval_ms=interval,
        samples=samples,
        ranks=slowest.world_size,
    )


def entry_of_recording(recording: Recording, folder: Path) -> Entry:
    """Return the entry of a recording, with the pace of its slowest rank.

    Raises:
        UnreadableInput: If the recording has no training steps.
    """
    pace = pace_of_recording(recording, str(folder))
    first, command = recording.ranks[0], recording.command
    micro_steps = max(1, round(first.micro_steps))
    samples = first.samples_per_step or first.model_batch * micro_steps
    optimizer = optimizer_called(first.optimizer)
    execution = Execution(
        micro_batch=max(1, round(samples / micro_steps)),
        accumulation=micro_steps,
        nproc_per_node=pace.ranks,
        precision=first.number_format if first.number_format in PRECISIONS else "torch_fp32",
        optimizer=optimizer if optimizer in OPTIMIZERS else Execution().optimizer,
    )
    script = next((part for part in command if part.endswith(".py")), command[0])
    return Entry(
        id=new_id(),
        created_at=now_utc(),
        kind="watch",
        outcome="ok",
        model=os.path.basename(script),
        device=catalogue_name(first.accelerator) or first.accelerator or "cpu",
        execution=execution,
        num_devices=pace.ranks,
        step_time_ms=pace.step_ms,
        interval_ms=pace.interval_ms,
        environment={"torch": first.torch},
        command=shlex.join(command),
        source=folder.name,
    )


def pace_of_entry(entry: Entry) -> Pace:
    """Return the pace of a run in the journal.

    Raises:
        TrainpaceError: If the run has no step time.
    """
    if not entry.step_time_ms:
        raise TrainpaceError(
            f"run {entry.id[:8]} has no step time ({entry.reason or entry.outcome})."
        )
    return Pace(
        run=f"run {entry.id[:8]}",
        step_ms=entry.step_time_ms,
        interval_ms=entry.interval_ms,
        samples=entry.execution.global_batch,
        ranks=entry.execution.world_size,
    )


def guard(baseline: Pace, now: Pace, tolerance: float = TOLERANCE) -> Guarded:
    """Compare the pace of a run with a baseline.

    Raises:
        Contradiction: If the samples per step or the numbers of ranks differ.
    """
    if baseline.samples and now.samples and abs(baseline.samples - now.samples) > 0.5:
        raise Contradiction(
            (
                f"a step has {now.samples:g} samples, but {baseline.samples:g} in "
                f"{baseline.run}, so their times do not compare."
            ),
            "Record a baseline with this batch.",
        )
    if baseline.ranks != now.ranks:
        raise Contradiction(
            f"this run trained on {now.ranks} ranks, but {baseline.run} on {baseline.ranks}.",
            "Record a baseline with this number of ranks.",
        )
    ratio = ratio_between(baseline.step_ms, baseline.interval_ms, now.step_ms, now.interval_ms)
    least = ratio.ratio if ratio.low is None else ratio.low
    return Guarded(
        baseline=baseline,
        now=now,
        ratio=ratio,
        tolerance=tolerance,
        regressed=least > 1 + tolerance,
    )


LATELY = 20
"""Number of runs that count as the latest ones."""


class Score(Record):
    """Errors of `n` forecasts in percent of the measured step: (forecast - measured) / measured.

    `mean_pct` and `median_pct` are of the absolute errors, and `bias_pct` is the median of the
    signed errors. `coverage_pct` is the share of measurements inside their forecast's interval,
    among the `n_with_interval` that have one.
    """

    name: str
    n: int
    mean_pct: float | None
    median_pct: float | None
    bias_pct: float | None
    n_with_interval: int
    coverage_pct: float | None


class Point(Record):
    """Mean absolute error in percent over the last `LATELY` runs, and over all runs so far."""

    created_at: str
    lately_pct: float
    all_pct: float


class Scores(Record):
    """Scores of all runs, of the last `LATELY` runs, by device, by model, and over time."""

    overall: Score
    lately: Score
    by_device: tuple[Score, ...]
    by_model: tuple[Score, ...]
    over_time: tuple[Point, ...]


def error_pct(entry: Entry) -> float | None:
    """Return the signed error of an entry's forecast in percent, or None if it has none."""
    if entry.forecast_ms is None or not entry.step_time_ms:
        return None
    return 100 * (entry.forecast_ms - entry.step_time_ms) / entry.step_time_ms


def scores(entries: Iterable[Entry]) -> Scores:
    """Score the entries that have both a forecast and a measured step time.

    Imported runs do not count, because their forecasts were made at the import.
    """
    scored = sorted(
        (e for e in entries if error_pct(e) is not None and e.kind != "import"),
        key=lambda e: (e.created_at, e.id),
    )
    return Scores(
        overall=score("all", scored),
        lately=score(f"last {LATELY}", scored[-LATELY:]),
        by_device=_by(scored, lambda entry: entry.device),
        by_model=_by(scored, lambda entry: entry.model),
        over_time=_over_time(scored),
    )


def score(name: str, entries: Sequence[Entry]) -> Score:
    """Return the score of the forecasts of some entries."""
    errors = [error for entry in entries if (error := error_pct(entry)) is not None]
    sizes = [abs(error) for error in errors]
    inside = [
        e.forecast_low_ms <= e.step_time_ms <= e.forecast_high_ms
        for e in entries
        if e.forecast_low_ms is not None and e.step_time_ms and e.forecast_high_ms
    ]
    return Score(
        name=name,
        n=len(errors),
        mean_pct=statistics.fmean(sizes) if errors else None,
        median_pct=statistics.median(sizes) if errors else None,
        bias_pct=statistics.median(errors) if errors else None,
        n_with_interval=len(inside),
        coverage_pct=100 * sum(inside) / len(inside) if inside else None,
    )


def _by(entries: Sequence[Entry], key: Callable[[Entry], str]) -> tuple[Score, ...]:
    return tuple(score(name, list(group)) for name, group in groupby(sorted(entries, key=key), key))


def _over_time(entries: Sequence[Entry]) -> tuple[Point, ...]:
    sizes = [abs(error_pct(entry) or 0.0) for entry in entries]
    means = (total / i for i, total in enumerate(accumulate(sizes), 1))
    return tuple(
        Point(
            created_at=entry.created_at,
            lately_pct=statistics.fmean(sizes[max(0, i - LATELY) : i]),
            all_pct=mean,
        )
        for i, (entry, mean) in enumerate(zip(entries, means, strict=True), 1)
    )


PUBLIC = "public:"
"""Prefix of the ids of public runs."""
MINE = "mine"
"""Name in a comparison for the user's own run that is most similar to the other side."""


def matching(
    query: Query, model_kind: str = "", runs: Sequence[PublicRun] | None = None
) -> list[PublicRun]:
    """Return the matching public runs, sorted by collection, model, card and batch.

    The filters are those of own runs. An optimizer matches whole words. Case never matters. Spaces,
    "-" and "_" make no difference in a model or an optimizer.

    Args:
        query: Filters.
        model_kind: Kind of model, or "" for all.
        runs: Runs to choose from. By default, all public runs.

    Raises:
        TrainpaceError: If a filter only applies to own runs.
    """
    q = query
    for name in ("outcome", "sweep", "workload_key", "since", "kind"):
        if getattr(q, name):
            raise TrainpaceError(f"public runs cannot be filtered by `{name}`.")
    equal = {
        "model_kind": model_kind or None,
        "precision": q.precision or None,
        "mode": q.mode or None,
        "micro_batch": q.micro_batch,
    }
    source, text = q.source.casefold(), q.text.casefold()

    def fulfils(run: PublicRun) -> bool:
        names = (
            (q.model, run.model, _folded),
            (q.device, run.device, str.casefold),
            (q.optimizer, run.optimizer or "", _spaced),
        )
        words = (run.model, run.device, run.source, run.notes, run.software)
        return (
            all(value in (None, getattr(run, name)) for name, value in equal.items())
            and all(
                _matches(spelled(part), spelled(own), q.exact)
                for part, own, spelled in names
                if part
            )
            and source in f"{run.source} {run.collection}".casefold()
            and text in " ".join(words).casefold()
        )

    return list(filter(fulfils, public_runs() if runs is None else runs))


def _matches(part: str, name: str, exact: bool) -> bool:
    return part == name if exact else bool(part) and part in name


def _folded(name: str) -> str:
    """Return a normalized name: ResNet-50, resnet_50 and resnet50 become equal."""
    return re.sub(r"[-_\s]", "", name.casefold()) or name.casefold()


def _spaced(name: str) -> str:
    """Return the words of a name with spaces around them, to search for whole words.

    "sgd" is then a part of "SGD momentum", but "adam" is not a part of "AdamW".
    """
    words = re.findall(r"[^\W_]+", name.casefold())
    return f" {' '.join(words)} " if words else ""


def is_public(id_: str) -> bool:
    """Return True if an id in a comparison names a public run."""
    return id_.strip().lower().startswith(PUBLIC)


def public_run(id_: str) -> PublicRun:
    """Return the public run whose id begins with these digits, with or without ``public:``.

    Raises:
        UnknownName: If no run matches.
        TrainpaceError: If several runs match.
    """
    wanted = id_.strip().lower().removeprefix(PUBLIC)
    found = [run for run in public_runs() if wanted and run.id.startswith(wanted)]
    if not found:
        raise UnknownName("public run", id_, (), "trainpace journal list --public shows their ids.")
    if len(found) > 1:
        raise TrainpaceError(
            f"several public runs start with {wanted}.", "Give more digits of the id."
        )
    return found[0]


def compared(journal: Journal, a: str, b: str) -> Comparison:
    """Compare two sides: each is a run or sweep of the journal, ``public:ID``, or ``mine``."""
    public = [public_run(side) if is_public(side) else None for side in (a, b)]
    left, right = _sides(journal, (a, b), public)
    made = compare(left, right)
    names = {entry_of_public(run).id: f"{PUBLIC}{run.id}" for run in public if run is not None}
    if not names:
        return made
    made = replace(
        made,
        a=tuple(names.get(id_, id_) for id_ in made.a),
        b=tuple(names.get(id_, id_) for id_ in made.b),
    )
    if len(left) == len(right) == 1:
        batches = (_global_batch(public[0], left[0]), _global_batch(public[1], right[0]))
        made = _with_global_batch(made, *batches)
    return made


def _sides(
    journal: Journal, ids: Sequence[str], public: Sequence[PublicRun | None]
) -> tuple[list[Entry], list[Entry]]:
    """Return the runs of both sides. `MINE` is chosen by the other side."""
    left, right = (_side(journal, id_, run) for id_, run in zip(ids, public, strict=True))
    if not left and not right:
        raise TrainpaceError(
            f"{MINE!r} stands for the own run most like the other side: name that one."
        )
    return left or [_mine(journal, right[0])], right or [_mine(journal, left[0])]


def _side(journal: Journal, id_: str, public: PublicRun | None) -> list[Entry]:
    """Return the runs of a side. `MINE` has none, because it depends on the other side."""
    if public is None:
        return [] if id_.strip().lower() == MINE else journal.run_or_sweep(id_)
    if not public.micro_batch:
        raise TrainpaceError(
            f"the source of {PUBLIC}{public.id} states no batch, so its step cannot be compared."
        )
    return [entry_of_public(public)]


def _global_batch(run: PublicRun | None, entry: Entry) -> int:
    """Return the samples per step.

    The source of a public run may state a number that does not follow from its other fields.
    """
    return (run and run.global_batch) or entry.execution.global_batch


def _with_global_batch(made: Comparison, a: int, b: int) -> Comparison:
    """Add the samples per step of both sides if they differ. Compute the throughput from them."""
    batches = _differences({"global_batch": str(a)}, {"global_batch": str(b)})
    pace = made.samples_per_second
    if made.ratios:
        (ratio,) = made.ratios
        pace = _rates(1e3 * a / ratio.a_ms, 1e3 * b / ratio.b_ms)
    return replace(made, conditions=(*made.conditions, *batches), samples_per_second=pace)


def _mine(journal: Journal, other: Entry) -> Entry:
    """Return the own run of the same model that is most similar to another run.

    Similarity is judged by sample size first, then card, batch and precision. The newest run wins a
    tie.

    Raises:
        TrainpaceError: If the journal has no run of this model.
    """
    plain = _folded(ModelSpec.of(other.model).plain_name)
    names = [
        name
        for name in names_of(journal, "model")
        if _folded(ModelSpec.of(name).plain_name) == plain
    ]
    asked = (Query(model=name, exact=True, outcome="ok", mode=other.mode) for name in names)
    runs = [run for query in asked for run in journal.find(query, limit=None) if run.id != other.id]
    if not runs:
        raise TrainpaceError(
            f"the journal contains no run of {other.model} to compare with.",
            "Name one: trainpace journal list.",
        )

    def likeness(run: Entry) -> tuple[object, ...]:
        x, y = run.execution, other.execution
        return (
            -_other_size(run, other),
            catalogue_name(run.device) == other.device,
            x.micro_batch == y.micro_batch,
            x.precision == y.precision,
            run.created_at,
            run.id,
        )

    return max(runs, key=likeness)


def _other_size(a: Entry, b: Entry) -> int:
    """Return 0 for equal sample sizes, 1 if a size is unknown, and 2 for different sizes."""
    sizes = (a.image_size, b.image_size), (a.sequence_length, b.sequence_length)
    return max(0 if one == other else 1 if None in (one, other) else 2 for one, other in sizes)


def entry_of_public(run: PublicRun) -> Entry:
    """Return a public run as an entry for comparisons. The entry is never stored."""
    return Entry(
        **shared_fields(run, Entry)
        | {
            "id": run.id.ljust(32, "0"),
            "created_at": _time(run.date),
            "kind": "import",
            "outcome": "ok",
            "execution": _public_execution(run),
            "num_devices": run.gpus,
            "forecast_low_ms": run.low_ms,
            "forecast_high_ms": run.high_ms,
            "environment": {"framework": run.software} if run.software else {},
            "notes": f"{run.source}: {run.url}",
        }
    )


def _public_execution(run: PublicRun) -> Execution:
    """Return the execution that a public run states, as far as it is known."""
    nodes = max(1, run.nodes)
    try:
        execution = replace(
            read_parallelism(run.parallelism or ""),
            nnodes=nodes,
            nproc_per_node=max(1, run.gpus // nodes),
        )
    except TrainpaceError:
        execution = Execution()
    precision: Any = run.precision or UNKNOWN
    return replace(
        execution,
        micro_batch=max(1, run.micro_batch),
        accumulation=max(1, run.accumulation),
        precision=precision,
        optimizer=run.optimizer or ("none" if run.mode != "train" else UNKNOWN),
        compile=run.compile in ("compile", "xla"),
        channels_last=run.memory_format == "nhwc",
    )


def _time(date: str | None) -> str:
    """Return the first moment of a date, which may be only a year or a month."""
    return f"{date or '1970'}-01-01"[:10] + "T00:00:00.000000Z"
