"""The journal's pages as records: each is the page's JSON twin, and what its template shows."""

from msgspec.structs import replace

from trainpace.errors import TrainpaceError, UnknownName
from trainpace.journal import (
    LATELY,
    MOST_COUNTED,
    Comparison,
    Entry,
    Journal,
    Query,
    Scores,
    Sweep,
    compare,
    error_pct,
    names_of,
    page,
    probe_of,
    scores,
)
from trainpace.measure import SweepAnalysis, analyse
from trainpace.outcome import Measurement
from trainpace.records import Record
from trainpace.report import BATCH, FEWEST, Axis, BarChart, Chart, Mark, Series, Timed, measured_sweep, step_breakdown
from trainpace.units import format_number
from trainpace.web.questions import (
    CompareQuestion,
    RunQuestion,
    RunsQuestion,
    ScoreQuestion,
    SweepQuestion,
    SweepsQuestion,
    query_of,
)
from trainpace.web.whatif import STEP_TIME

PAGE = 25
MOST_SCORED = 2000
"""Forecast runs that are scored, the newest."""
MOST_OF_SWEEP = 5000
MOST_NAMES_SHOWN = 300
ORDERS = {
    "newest": ("time", True), "oldest": ("time", False), "fastest": ("step", False), "slowest": ("step", True),
    "model": ("model", False), "device": ("device", False),
}  # fmt: skip


class RunLine(Record):
    id: str
    created_at: str
    kind: str
    outcome: str
    model: str
    device: str
    num_devices: int
    micro_batch: int
    accumulation: int
    precision: str
    optimizer: str
    step_time_ms: float | None
    step_time_ms_low: float | None
    step_time_ms_high: float | None
    samples_per_second: float | None
    peak_memory_gib: float | None
    forecast_ms: float | None
    forecast_error_pct: float | None
    sweep: str | None


class RunsPage(Record):
    """A page of runs. `count`: how many from here on, None for more than are counted. `following`: the query of the next page."""

    question: RunsQuestion
    runs: tuple[RunLine, ...]
    count: int | None
    counted_to: int
    following: str
    models: tuple[str, ...]
    devices: tuple[str, ...]


class RunPage(Record):
    question: RunQuestion
    run: Entry
    parts: BarChart | None
    steps: Chart | None


class ComparePage(Record):
    question: CompareQuestion
    comparison: Comparison | None
    chart: Chart | None


class SweepsPage(Record):
    question: SweepsQuestion
    sweeps: tuple[Sweep, ...]
    more: bool


class SweepPage(Record):
    question: SweepQuestion
    sweep: Sweep
    analysis: SweepAnalysis | None
    reason: str
    runs: tuple[RunLine, ...]
    chart: Chart | None


class ScorePage(Record):
    """How good the newest forecasts were. `all_of_them`: there are no older ones."""

    question: ScoreQuestion
    scores: Scores
    newest: int
    all_of_them: bool
    chart: Chart | None


def runs_page(journal: Journal, q: RunsQuestion) -> RunsPage:
    query = Query(
        model=q.model, device=q.device, precision=q.precision, kind=q.kind, outcome=q.outcome, micro_batch=q.batch,
        since=q.since, sweep=q.sweep, text=q.text,
    )  # fmt: skip
    listed = page(journal, query, *ORDERS[q.order], q.after, PAGE)
    names = [tuple((names_of(journal, column) or [])[:MOST_NAMES_SHOWN]) for column in ("model", "device")]
    return RunsPage(
        question=q, runs=tuple(map(line_of, listed.entries)), count=listed.matches, counted_to=MOST_COUNTED,
        following=query_of(q, after=listed.after) if listed.after else "", models=names[0], devices=names[1],
    )  # fmt: skip


def line_of(e: Entry) -> RunLine:
    i, x = e.interval_ms, e.execution
    return RunLine(
        id=e.id, created_at=e.created_at, kind=e.kind, outcome=e.outcome, model=e.model, device=e.device,
        num_devices=e.num_devices, micro_batch=x.micro_batch, accumulation=x.accumulation, precision=x.precision,
        optimizer=x.optimizer, step_time_ms=e.step_time_ms, step_time_ms_low=None if i is None else i.low,
        step_time_ms_high=None if i is None else i.high, samples_per_second=e.samples_per_second,
        peak_memory_gib=e.peak_memory_gib, forecast_ms=e.forecast_ms, forecast_error_pct=error_pct(e), sweep=e.sweep,
    )  # fmt: skip


def run_page(journal: Journal, q: RunQuestion) -> RunPage:
    e = journal.get(q.id)
    parts = None if e.step is None else step_breakdown([Timed("", "measured", e.step)])
    steps = None
    if len(e.step_times_ms) > 1:
        x = tuple(float(i + 1) for i in range(len(e.step_times_ms)))
        median = [] if e.step_time_ms is None else [Mark(axis="y", at=e.step_time_ms, text="median", tone="forecast")]
        steps = Chart(
            title="Every step", x=Axis(label="step"), y=STEP_TIME, marks=tuple(median),
            finding=f"{len(x)} timed steps from {format_number(min(e.step_times_ms))} to"
            f" {format_number(max(e.step_times_ms))} ms.",
            series=(Series(name="measured", kind="points", tone="measured", x=x, y=e.step_times_ms),),
        )  # fmt: skip
    return RunPage(question=q, run=e, parts=parts, steps=steps)


def compare_page(journal: Journal, q: CompareQuestion) -> ComparePage:
    if not q.a or not q.b:
        return ComparePage(question=q, comparison=None, chart=None)
    comparison = compare(journal.run_or_sweep(q.a), journal.run_or_sweep(q.b))
    chart = None
    if len(comparison.ratios) > 1:
        x = tuple(float(r.batch) for r in comparison.ratios)
        a_ms, b_ms = (tuple(getattr(r, side) for r in comparison.ratios) for side in ("a_ms", "b_ms"))
        sides = (("A", "first", a_ms), ("B", "second", b_ms))
        assert comparison.median_ratio is not None
        chart = Chart(
            title="Step time against the batch size", x=BATCH, y=STEP_TIME,
            finding=f"B takes {comparison.median_ratio:.3f} times as long as A at the median over {len(x)} batch sizes.",
            series=tuple(Series(name=name, kind="line", tone=tone, x=x, y=y) for name, tone, y in sides),
        )  # fmt: skip
    return ComparePage(question=q, comparison=comparison, chart=chart)


def sweeps_page(journal: Journal, q: SweepsQuestion) -> SweepsPage:
    sweeps = journal.newest_sweeps(PAGE + 1, (q.page - 1) * PAGE)
    return SweepsPage(question=q, sweeps=tuple(sweeps[:PAGE]), more=len(sweeps) > PAGE)


def sweep_page(journal: Journal, q: SweepQuestion) -> SweepPage:
    sweeps = journal.sweeps(q.id)
    if len(sweeps) != 1:
        raise UnknownName("sweep", q.id, ()) if not sweeps else TrainpaceError(f"several sweeps start with {q.id}.")
    (sweep,) = sweeps
    entries = journal.find(Query(sweep=sweep.id), limit=MOST_OF_SWEEP, newest_first=False)
    try:
        outcomes = [probe_of(entry) for entry in entries]
        if not any(isinstance(outcome, Measurement) for outcome in outcomes):
            raise TrainpaceError("no batch size of this sweep was measured.")
        analysis, reason = analyse(outcomes), ""
    except (TrainpaceError, ValueError) as error:
        analysis, reason = None, str(error)
    return SweepPage(
        question=q, sweep=sweep, analysis=analysis, reason=reason, runs=tuple(map(line_of, entries)),
        chart=None if analysis is None else _sweep_chart(analysis, entries),
    )  # fmt: skip


def score_page(journal: Journal, q: ScoreQuestion) -> ScorePage:
    query = Query(model=q.model, device=q.device, outcome="ok", with_forecast=True)
    newest = page(journal, query, size=MOST_SCORED, most=MOST_SCORED)
    result = scores(newest.entries)
    return ScorePage(
        question=q, scores=result, newest=len(newest.entries), all_of_them=not newest.after, chart=_score_chart(result)
    )


def _sweep_chart(a: SweepAnalysis, entries: list[Entry]) -> Chart:
    chart = measured_sweep(a, {})
    foreseen = {e.execution.micro_batch: e for e in entries if e.forecast_ms and e.forecast_low_ms is not None}
    if len(foreseen) < FEWEST:
        return chart
    forecast = [foreseen[batch] for batch in sorted(foreseen)]
    line = Series(
        name="forecast before it, 90 % interval", kind="line", tone="forecast", dashed=True,
        x=tuple(float(e.execution.micro_batch) for e in forecast), y=tuple(e.forecast_ms for e in forecast),
        low=tuple(e.forecast_low_ms or 0.0 for e in forecast), high=tuple(e.forecast_high_ms or 0.0 for e in forecast),
    )  # fmt: skip
    return replace(chart, series=(line, *chart.series))


def _score_chart(s: Scores) -> Chart | None:
    if len(s.over_time) < 2 or s.overall.mean_pct is None:
        return None
    x = tuple(float(i + 1) for i in range(len(s.over_time)))
    lately, so_far = (tuple(getattr(p, name) for p in s.over_time) for name in ("lately_pct", "all_pct"))
    return Chart(
        title="Error of the forecasts over time", x=Axis(label="forecast runs, the oldest first"),
        y=Axis(label="mean absolute error", unit="%", low=0.0),
        finding=f"Over {len(x):,} runs the forecasts were off by {s.overall.mean_pct:.1f} % on average, lately by"
        f" {s.over_time[-1].lately_pct:.1f} %.",
        series=(
            Series(name=f"of the last {LATELY} runs", kind="line", tone="measured", x=x, y=lately),
            Series(name="of all runs so far", kind="line", tone="forecast", x=x, y=so_far, dashed=True),
        ),
    )  # fmt: skip
