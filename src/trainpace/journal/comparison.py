"""Comparisons of measured runs: with each other, with their forecasts, and with public runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from trainpace.core.errors import Contradiction, TrainpaceError, UnreadableInput
from trainpace.core.outcome import STEP_PARTS, Interval
from trainpace.core.records import Record
from trainpace.core.stats import noise_of, repeat_interval
from trainpace.journal.entry import UNKNOWN, Entry, shared_fields

if TYPE_CHECKING:
    from trainpace.watch import Recording


import re
from typing import Any

from msgspec.structs import replace

from trainpace.core.errors import UnknownName
from trainpace.core.execution import PRECISIONS, Execution
from trainpace.core.hardware import catalogue_name
from trainpace.forecast import PublicRun, public_runs, read_parallelism
from trainpace.journal.store import Journal, Query, names_of
from trainpace.workload import ModelSpec

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
    single = len(a) == 1 and len(b) == 1
    pairs = [(a[0], b[0])] if single else _same_batch(a, b)
    intervals = {} if single else _repeat_intervals(a) | _repeat_intervals(b)
    ratios = tuple(ratio for pair in pairs if (ratio := ratio_of(*pair, intervals)) is not None)
    made = Comparison(
        a=tuple(entry.id for entry in a),
        b=tuple(entry.id for entry in b),
        conditions=_conditions(a[0], b[0], single) if a and b else (),
        parts_ms=(),
        memory_gib=(),
        ratios=ratios,
        samples_per_second=_rates(_best_rate(a), _best_rate(b)),
        median_ratio=statistics.median(ratio.ratio for ratio in ratios) if ratios else None,
    )
    if not single:
        return made
    return replace(
        made,
        parts_ms=_side_by_side(a[0].step, b[0].step, STEP_PARTS, "_ms"),
        memory_gib=_side_by_side(a[0], b[0], _MEMORY, "_memory_gib"),
    )


def _best_rate(side: Sequence[Entry]) -> float:
    return max((entry.samples_per_second or 0.0 for entry in side), default=0.0)


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


def _same_batch(a: Sequence[Entry], b: Sequence[Entry]) -> list[tuple[Entry, Entry]]:
    left, right = (
        {batch: _middle(some) for batch, some in _by_batch(side).items()} for side in (a, b)
    )
    return [(left[batch], right[batch]) for batch in sorted(left.keys() & right.keys())]


def _by_batch(side: Sequence[Entry]) -> dict[int, list[Entry]]:
    some: dict[int, list[Entry]] = {}
    for entry in side:
        if entry.outcome == "ok" and entry.step_time_ms:
            some.setdefault(entry.execution.micro_batch, []).append(entry)
    return some


def _middle(entries: Sequence[Entry]) -> Entry:
    return sorted(entries, key=lambda entry: entry.step_time_ms or 0.0)[len(entries) // 2]


def _repeat_intervals(side: Sequence[Entry]) -> dict[str, Interval]:
    """Return the interval for one more run of each batch size, by the id of its middle run."""
    groups = _by_batch(side)
    medians = {
        batch: [e.step_time_ms for e in some if e.step_time_ms] for batch, some in groups.items()
    }
    noise = noise_of(medians)
    if noise is None:
        return {}
    return {
        _middle(some).id: repeat_interval(medians[batch], noise) for batch, some in groups.items()
    }


def _conditions(a: Entry, b: Entry, single: bool) -> tuple[Difference, ...]:
    """Return the differences between two runs, their executions and their environments.

    For sweeps, the batch size is ignored.
    """

    def facts(entry: Entry) -> dict[str, str]:
        own = {
            name: getattr(entry, name) for name in (*_CONDITIONS, *(["outcome"] if single else []))
        }
        execution = asdict(entry.execution)
        if not single:
            del execution["micro_batch"]
        stated = (
            own
            | execution
            | {f"environment: {key}": value for key, value in entry.environment.items()}
        )
        return {name: "" if value is None else str(value) for name, value in stated.items()}

    left, right = facts(a), facts(b)
    return tuple(
        Difference(name=name, a=left.get(name, ""), b=right.get(name, ""))
        for name in left | right
        if left.get(name, "") != right.get(name, "")
    )


def _side_by_side(
    a: object, b: object, names: Iterable[str], suffix: str
) -> tuple[Difference, ...]:
    """Return the numbers that both sides have, unless both are 0. Names lose their suffix."""
    return tuple(
        Difference(name=name.removesuffix(suffix), a=left, b=right)
        for name in names
        if (left := getattr(a, name, None)) is not None
        and (right := getattr(b, name, None)) is not None
        and (left or right)
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
    bounds = [(e.forecast_low_ms, e.step_time_ms, e.forecast_high_ms) for e in entries]
    inside = _inside(bounds)
    return Score(
        name=name,
        n=len(errors),
        mean_pct=statistics.fmean(sizes) if sizes else None,
        median_pct=statistics.median(sizes) if sizes else None,
        bias_pct=statistics.median(errors) if errors else None,
        n_with_interval=len(inside),
        coverage_pct=100 * sum(inside) / len(inside) if inside else None,
    )


def _inside(bounds: Iterable[tuple[float | None, float | None, float | None]]) -> list[bool]:
    """Return a flag for each complete (low, measured, high): True if the interval has the value."""
    return [low <= ms <= high for low, ms, high in bounds if low is not None and ms and high]


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


class PublicQuery(Record):
    """Filters for public runs. All of them must hold, as in `Query`.

    `model` and `device` match a part of the name, and `optimizer` matches whole words. With
    `exact`, each of them must match completely. `source` and `text` always match a part. Case never
    matters. Spaces, "-" and "_" make no difference in a model or an optimizer.
    """

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
    """Return the matching public runs, sorted by collection, model, card and batch.

    `kind` filters by the kind of model.
    """
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
    """Return a normalized name: ResNet-50, resnet_50 and resnet50 become equal."""
    return re.sub(r"[-_\s]", "", name.casefold()) or name.casefold()


def _spaced(name: str) -> str:
    """Return the words of a name with spaces around them, to search for whole words.

    "sgd" is then a part of "SGD momentum", but "adam" is not a part of "AdamW".
    """
    words = re.findall(r"[^\W_]+", name.casefold())
    return f" {' '.join(words)} " if words else ""


def public_query(query: Query, kind: str = "") -> PublicQuery:
    """Return the same filters for public runs.

    Raises:
        TrainpaceError: If a filter only applies to own runs.
    """
    for name in ("outcome", "sweep", "workload_key", "since", "kind"):
        if getattr(query, name):
            raise TrainpaceError(f"public runs cannot be filtered by `{name}`.")
    shared = {
        name: getattr(query, name) for name in PublicQuery.__struct_fields__ if hasattr(query, name)
    }
    return PublicQuery(**{**shared, "kind": kind})


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
    """Compare two sides: each is a run or sweep of the journal, ``public:ID``, or ``mine``."""
    public = [public_run(side) if is_public(side) else None for side in (a, b)]
    left, right = _sides(journal, a, b)
    made = compare(left, right)
    names = {entry_of_public(run).id: f"{PUBLIC}{run.id}" for run in public if run is not None}
    if not names:
        return made
    made = replace(
        made,
        a=tuple(names.get(id_, id_) for id_ in made.a),
        b=tuple(names.get(id_, id_) for id_ in made.b),
    )
    if len(left) != 1 or len(right) != 1:
        return made
    batches = (_global_batch(public[0], left[0]), _global_batch(public[1], right[0]))
    return _with_global_batch(made, *batches)


def _sides(journal: Journal, a: str, b: str) -> list[list[Entry]]:
    """Return the runs of both sides. ``mine`` is chosen by the other side."""
    sides = [[] if side.strip().lower() == MINE else _side(journal, side) for side in (a, b)]
    if sides == [[], []]:
        raise TrainpaceError(
            f"{MINE!r} stands for the own run most like the other side: name that one."
        )
    return [
        side or [_mine(journal, other[0])]
        for side, other in zip(sides, reversed(sides), strict=True)
    ]


def _global_batch(run: PublicRun | None, entry: Entry) -> int:
    """Return the samples per step.

    The source of a public run may state a number that does not follow from its other fields.
    """
    return (
        run.global_batch if run is not None and run.global_batch else entry.execution.global_batch
    )


def _with_global_batch(made: Comparison, a: int, b: int) -> Comparison:
    """Add the samples per step of both sides if they differ. Compute the throughput from them."""
    conditions = (
        *made.conditions,
        *([Difference(name="global_batch", a=str(a), b=str(b))] if a != b else []),
    )
    pace = made.samples_per_second
    if made.ratios:
        (ratio,) = made.ratios
        pace = _rates(1e3 * a / ratio.a_ms, 1e3 * b / ratio.b_ms)
    return replace(made, conditions=conditions, samples_per_second=pace)


def _side(journal: Journal, id_: str) -> list[Entry]:
    if not is_public(id_):
        return journal.run_or_sweep(id_)
    run = public_run(id_)
    if not run.micro_batch:
        raise TrainpaceError(
            f"the source of {PUBLIC}{run.id} states no batch, so its step cannot be compared."
        )
    return [entry_of_public(run)]


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
        for name in names_of(journal, "model") or ()
        if _folded(ModelSpec.of(name).plain_name) == plain
    ]
    asked = (Query(model=name, exact=True, outcome="ok", mode=other.mode) for name in names)
    runs = [run for query in asked for run in journal.find(query, limit=None) if run.id != other.id]
    runs.sort(key=lambda run: (run.created_at, run.id), reverse=True)
    if not runs:
        raise TrainpaceError(
            f"the journal contains no run of {other.model} to compare with.",
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

    return min(runs, key=unlike)  # The newest run wins a tie.


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
    """Return the first moment of a date, which may be only a year or a month."""
    parts = re.fullmatch(r"(\d{4})(?:-(\d\d))?(?:-(\d\d))?.*", date or "")
    year, month, day = (
        (parts[1], parts[2] or "01", parts[3] or "01") if parts else ("1970", "01", "01")
    )
    return f"{year}-{month}-{day}T00:00:00.000000Z"


class Accuracy(Record):
    """Errors of `n` forecasts in percent of the measured step.

    `inside_pct` is the share of measurements inside their forecast's interval.
    """

    n: int
    mean_pct: float | None
    median_pct: float | None
    inside_pct: float | None


class AccuracyLine(Record):
    """Accuracy of forecasts on runs outside the fit and on runs of the fit.

    Only the runs outside the fit show how far to trust a forecast.
    """

    name: str
    not_in_fit: Accuracy
    in_fit: Accuracy


def accuracy(name: str, runs: Sequence[PublicRun]) -> AccuracyLine:
    """Return the accuracy on the runs that have a forecast."""
    apart = [
        [run for run in runs if run.forecast_ms is not None and run.in_fit is in_fit]
        for in_fit in (False, True)
    ]
    return AccuracyLine(name=name, not_in_fit=_accuracy(apart[0]), in_fit=_accuracy(apart[1]))


def accuracy_by(runs: Sequence[PublicRun], field: str) -> tuple[AccuracyLine, ...]:
    """Return one line per value of a field of `PublicRun`, sorted by name."""
    groups: dict[str, list[PublicRun]] = {}
    for run in runs:
        if run.forecast_ms is not None:
            groups.setdefault(getattr(run, field), []).append(run)
    return tuple(accuracy(name, groups[name]) for name in sorted(groups, key=str.casefold))


def _accuracy(runs: Sequence[PublicRun]) -> Accuracy:
    errors = [abs(error) for run in runs if (error := run.error_pct) is not None]
    inside = _inside((run.low_ms, run.step_time_ms, run.high_ms) for run in runs)
    return Accuracy(
        n=len(errors),
        mean_pct=statistics.fmean(errors) if errors else None,
        median_pct=statistics.median(errors) if errors else None,
        inside_pct=100 * sum(inside) / len(inside) if inside else None,
    )
