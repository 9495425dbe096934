"""Pages about runs as records. A record is the page's JSON, and the input of its template."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl, urlencode

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from trainpace import report
from trainpace.core.errors import TrainpaceError, UnknownName, nearest_names
from trainpace.core.execution import Precision
from trainpace.core.outcome import Measurement
from trainpace.core.records import Record, common_fields
from trainpace.core.units import format_number
from trainpace.forecast import PublicRun, Score, public_runs, score_of
from trainpace.journal import (
    MOST_COUNTED,
    Comparison,
    Entry,
    Journal,
    Kind,
    Outcome,
    Query,
    Scores,
    Sweep,
    compared,
    error_pct,
    matching,
    names_of,
    page,
    probe_of,
    public_run,
    scores,
)
from trainpace.measure import SweepAnalysis, analyse
from trainpace.web.whatif import STEP_TIME, Text

PAGE = 25
MOST_SCORED = 2000
"""Maximum number of forecast runs to score, the newest first."""
MOST_OF_SWEEP = 5000
MOST_NAMES_SHOWN = 300
Order = Literal["newest", "oldest", "fastest", "slowest", "model", "device"]
ORDERS: dict[Order, tuple[str, bool]] = {
    "newest": ("time", True),
    "oldest": ("time", False),
    "fastest": ("step", False),
    "slowest": ("step", True),
    "model": ("model", False),
    "device": ("device", False),
}
Id = Annotated[str, Meta(max_length=32)]


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


class RunsQuestion(Record):
    """Filters and order of runs. `after` is the number of runs on the previous pages."""

    model: Text = ""
    device: Text = ""
    precision: Literal["", Precision] = ""
    mode: Literal["", "train", "forward_backward", "inference"] = ""
    source: Text = ""
    kind: Literal["", Kind] = ""
    outcome: Literal["", Outcome] = ""
    batch: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    since: Annotated[str, Meta(max_length=40)] = ""
    sweep: Id = ""
    text: Text = ""
    order: Order = "newest"
    after: Annotated[int, Meta(ge=0, le=10**9)] = 0


class RunsPage(Record):
    """A page of runs.

    `count` is the number of runs from here on, or None if there are too many to count. `following`
    is the query of the next page.
    """

    question: RunsQuestion
    runs: tuple[RunLine, ...]
    count: int | None
    counted_to: int
    following: str
    models: tuple[str, ...]
    devices: tuple[str, ...]


class RunQuestion(Record):
    id: Id


class RunPage(Record):
    question: RunQuestion
    run: Entry
    parts: report.BarChart | None
    steps: report.Chart | None


class CompareQuestion(Record):
    a: Id = ""
    b: Id = ""


class ComparePage(Record):
    question: CompareQuestion
    comparison: Comparison | None
    chart: report.Chart | None


class SweepsQuestion(Record):
    page: Annotated[int, Meta(ge=1, le=100_000)] = 1


class SweepsPage(Record):
    question: SweepsQuestion
    sweeps: tuple[Sweep, ...]
    more: bool


class SweepQuestion(Record):
    id: Id


class SweepPage(Record):
    question: SweepQuestion
    sweep: Sweep
    analysis: SweepAnalysis | None
    reason: str
    runs: tuple[RunLine, ...]
    chart: report.Chart | None
    verdict: tuple[str, ...]


class ScoreQuestion(Record):
    model: Text = ""
    device: Text = ""


class ScorePage(Record):
    """Score of the newest forecasts. `all_of_them` is True if there are no older ones."""

    question: ScoreQuestion
    scores: Scores
    newest: int
    all_of_them: bool
    chart: report.Chart | None


def runs_page(journal: Journal, q: RunsQuestion) -> RunsPage:
    listed = page(
        journal,
        Query(micro_batch=q.batch, **common_fields(q, Query)),
        *ORDERS[q.order],
        q.after,
        PAGE,
    )
    models, devices = (
        names_of(journal, column, MOST_NAMES_SHOWN) for column in ("model", "device")
    )
    return RunsPage(
        question=q,
        runs=tuple(map(line_of, listed.entries)),
        count=listed.matches,
        counted_to=MOST_COUNTED,
        following=query_of(q, after=listed.following) if listed.following else "",
        models=tuple(models),
        devices=tuple(devices),
    )


def line_of(e: Entry) -> RunLine:
    return RunLine(
        **common_fields(e, RunLine),
        **common_fields(e.execution, RunLine),
        step_time_ms_low=None if e.interval_ms is None else e.interval_ms.low,
        step_time_ms_high=None if e.interval_ms is None else e.interval_ms.high,
        samples_per_second=e.samples_per_second,
        forecast_error_pct=error_pct(e),
    )


def run_page(journal: Journal, q: RunQuestion) -> RunPage:
    e = journal.get(q.id)
    parts = (
        None if e.step is None else report.step_breakdown([report.Timed("", "measured", e.step)])
    )
    steps = None
    if len(e.step_times_ms) > 1:
        median = e.step_time_ms
        steps = report.Chart(
            title="Every step",
            x=report.Axis(label="step"),
            y=STEP_TIME,
            marks=(
                ()
                if median is None
                else (report.Mark(axis="y", at=median, text="median", tone="forecast"),)
            ),
            finding=(
                f"{len(e.step_times_ms)} timed steps from {format_number(min(e.step_times_ms))} to"
                f" {format_number(max(e.step_times_ms))} ms."
            ),
            series=(
                report.series("measured", "points", "measured", enumerate(e.step_times_ms, 1)),
            ),
        )
    return RunPage(question=q, run=e, parts=parts, steps=steps)


def compare_page(journal: Journal, q: CompareQuestion) -> ComparePage:
    if not q.a or not q.b:
        return ComparePage(question=q, comparison=None, chart=None)
    comparison = compared(journal, q.a, q.b)
    chart = None
    if len(comparison.ratios) > 1:
        a, b = ([(r.batch, getattr(r, ms)) for r in comparison.ratios] for ms in ("a_ms", "b_ms"))
        assert comparison.median_ratio is not None
        chart = report.Chart(
            title="Step time against the batch size",
            x=report.BATCH,
            y=STEP_TIME,
            finding=(
                f"B takes {comparison.median_ratio:.3f} times as long as A at the median over"
                f" {len(a)} batch sizes."
            ),
            series=(
                report.series("A", "line", "first", a),
                report.series("B", "line", "second", b),
            ),
        )
    return ComparePage(question=q, comparison=comparison, chart=chart)


def sweeps_page(journal: Journal, q: SweepsQuestion) -> SweepsPage:
    sweeps = journal.sweeps()[::-1][(q.page - 1) * PAGE :]
    return SweepsPage(question=q, sweeps=tuple(sweeps[:PAGE]), more=len(sweeps) > PAGE)


def sweep_page(journal: Journal, q: SweepQuestion) -> SweepPage:
    sweeps = journal.sweeps(q.id)
    if len(sweeps) != 1:
        raise (
            UnknownName("sweep", q.id, ())
            if not sweeps
            else TrainpaceError(f"Several sweeps start with {q.id}.")
        )
    (sweep,) = sweeps
    entries = journal.find(Query(sweep=sweep.id), limit=MOST_OF_SWEEP, newest_first=False)
    try:
        outcomes = [probe_of(entry) for entry in entries]
        if not any(isinstance(outcome, Measurement) for outcome in outcomes):
            raise TrainpaceError("No batch size of this sweep was measured.")
        analysis, reason = analyse(outcomes), ""
    except (TrainpaceError, ValueError) as error:
        analysis, reason = None, str(error)
    return SweepPage(
        question=q,
        sweep=sweep,
        analysis=analysis,
        reason=reason,
        runs=tuple(map(line_of, entries)),
        chart=None if analysis is None else _sweep_chart(analysis, entries),
        verdict=() if analysis is None else tuple(report.sweep_verdict(analysis)),
    )


def score_page(journal: Journal, q: ScoreQuestion) -> ScorePage:
    query = Query(model=q.model, device=q.device, outcome="ok", with_forecast=True)
    newest = page(journal, query, size=MOST_SCORED, most=MOST_SCORED)
    result = scores(newest.entries)
    return ScorePage(
        question=q,
        scores=result,
        newest=len(newest.entries),
        all_of_them=newest.following is None,
        chart=_score_chart(result),
    )


def _sweep_chart(a: SweepAnalysis, entries: list[Entry]) -> report.Chart:
    chart = report.measured_sweep(a, {})
    foreseen = {e.execution.micro_batch: e for e in entries if e.forecast_low_ms is not None}
    if len(foreseen) < report.FEWEST:
        return chart
    forecast = [foreseen[batch] for batch in sorted(foreseen)]
    line = report.Series(
        name="forecast before it, 90% interval",
        kind="line",
        tone="forecast",
        dashed=True,
        x=tuple(float(e.execution.micro_batch) for e in forecast),
        y=tuple(e.forecast_ms for e in forecast),
        low=tuple(e.forecast_low_ms or 0.0 for e in forecast),
        high=tuple(e.forecast_high_ms or 0.0 for e in forecast),
    )
    return replace(chart, series=(line, *chart.series))


def _score_chart(s: Scores) -> report.Chart | None:
    if len(s.over_time) < 2 or s.overall.mean_pct is None:
        return None
    lately, so_far = (
        enumerate([getattr(p, pct) for p in s.over_time], 1) for pct in ("lately_pct", "all_pct")
    )
    return report.Chart(
        title="Error of the forecasts over time",
        x=report.Axis(label="forecast runs, the oldest first"),
        y=report.Axis(label="mean absolute error", unit="%", low=0.0),
        finding=(
            f"Over {len(s.over_time):,} runs the forecasts were off by {s.overall.mean_pct:.1f}%"
            f" on average, lately by {s.over_time[-1].lately_pct:.1f}%."
        ),
        series=(
            report.series(f"of the {s.lately.name} runs", "line", "measured", lately),
            report.series("of all runs so far", "line", "forecast", so_far, dashed=True),
        ),
    )


Mode = Literal["train", "forward_backward", "inference"]
MODES: tuple[Mode, ...] = get_args(Mode)
Fit = Literal["not_in_fit", "in_fit"]


class PublicQuestion(Record):
    """Filters of public runs. `kind` is the kind of model."""

    model: Text = ""
    device: Text = ""
    precision: Literal["", Precision] = ""
    batch: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    mode: Literal["", Mode] = ""
    source: Text = ""
    kind: Text = ""
    text: Text = ""
    page: Annotated[int, Meta(ge=1, le=100_000)] = 1


class PublicPage(Record):
    """A page of public runs.

    `count` is the number of matching runs. `following` is the query of the next page.
    """

    question: PublicQuestion
    runs: tuple[PublicRun, ...]
    count: int
    following: str
    before: str
    models: tuple[str, ...]
    devices: tuple[str, ...]
    sources: tuple[str, ...]
    kinds: tuple[str, ...]


class PublicRunQuestion(Record):
    id: Id


class PublicRunPage(Record):
    question: PublicRunQuestion
    run: PublicRun
    facts: tuple[tuple[str, str], ...]


class AccuracyQuestion(Record):
    """Filters of the accuracy page. `card` and `kind` are as in the public journal."""

    card: Text = ""
    kind: Text = ""
    fit: Literal["", Fit] = ""


class AccuracyPage(Record):
    """Forecasts of public runs compared with measurements. The rows of `score` are left out."""

    question: AccuracyQuestion
    chart: report.Chart | None
    score: Score
    cards: tuple[str, ...]
    kinds: tuple[str, ...]


def public_page(q: PublicQuestion) -> PublicPage:
    query = Query(**common_fields(q, Query) | {"kind": ""}, micro_batch=q.batch)
    found = matching(query, q.kind)
    start = (q.page - 1) * PAGE
    return PublicPage(
        question=q,
        runs=tuple(found[start : start + PAGE]),
        count=len(found),
        following=query_of(q, page=q.page + 1) if start + PAGE < len(found) else "",
        before=query_of(q, page=q.page - 1) if q.page > 1 else "",
        models=_names("model"),
        devices=_names("device"),
        sources=_names("source"),
        kinds=_names("model_kind"),
    )


def public_run_page(q: PublicRunQuestion) -> PublicRunPage:
    run = public_run(q.id)
    return PublicRunPage(question=q, run=run, facts=tuple(report.public_facts(run)))


def accuracy_page(q: AccuracyQuestion) -> AccuracyPage:
    """Score public runs.

    Raises:
        UnknownName: No public run has this card or kind.
    """
    cards, kinds = _names("device"), _names("model_kind")
    for what, name, known in (("card", q.card, cards), ("kind of model", q.kind, kinds)):
        if name and name not in known:
            raise UnknownName(what, name, known)
    chosen = [
        run
        for run in public_runs()
        if q.card in ("", run.device)
        and q.kind in ("", run.model_kind)
        and (not q.fit or run.in_fit == (q.fit == "in_fit"))
    ]
    return AccuracyPage(
        question=q,
        chart=report.accuracy_chart(chosen),
        score=replace(score_of(chosen), rows=()),
        cards=cards,
        kinds=kinds,
    )


def _names(field: str) -> tuple[str, ...]:
    return tuple(sorted({getattr(run, field) for run in public_runs()}, key=str.casefold))


MOST_PARAMETERS = 40
Q = TypeVar("Q", bound=Record)


class BadQuestion(TrainpaceError):
    """Invalid query string (status 400)."""


def read_question(kind: type[Q], query: str) -> Q:
    """Parse a query string into a record. Ignores empty fields, which forms send.

    Raises:
        BadQuestion: A field is unknown, or its value is invalid.
    """
    try:
        pairs = parse_qsl(
            query, keep_blank_values=True, max_num_fields=MOST_PARAMETERS, errors="strict"
        )
    except UnicodeDecodeError:
        raise BadQuestion("The address is not UTF-8.") from None
    except ValueError:
        raise BadQuestion(f"More than {MOST_PARAMETERS} parameters.") from None
    given = {name: value.strip() for name, value in pairs if value.strip()}
    fields = kind.__struct_fields__
    for name, value in pairs:
        if name not in fields:
            near = nearest_names(name[:40], fields)
            raise BadQuestion(
                f"This page has no parameter {name[:40]!r}.",
                f"Nearest: {near[0]}." if near else f"It has {', '.join(fields)}.",
            )
        if "\x00" in value:
            raise BadQuestion(f"{name} is not valid text.")
    if len({name for name, _ in pairs}) < len(pairs):
        raise BadQuestion("A parameter is given twice.")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _bad_value(kind, given, str(error)) from None


def _bad_value(kind: type[Record], given: Mapping[str, str], error: str) -> BadQuestion:
    """Convert an error of msgspec to a sentence."""
    what, _, where = error.partition(" - at `$.")
    name = where.rstrip("`")
    choices = [str(c) for c in _choices(get_type_hints(kind).get(name)) if c]
    what = f"it is one of {', '.join(choices)}" if choices else _plain(what)
    sentence = f"{name} = {given.get(name, '')[:60]!r}: {what}" if name else what
    return BadQuestion(f"{sentence[0].lower()}{sentence[1:]}.".replace("`", ""))


def _choices(hint: object) -> list[object]:
    """Return the values of a Literal inside any type."""
    if get_origin(hint) is Literal:
        return [c for arg in get_args(hint) for c in _choices(arg) or [arg]]
    return [c for arg in get_args(hint) for c in _choices(arg)] if hint is not None else []


def _plain(what: str) -> str:
    for word, plain in (
        ("Object missing required field", "this page needs the parameter"),
        ("Expected ", "give "),
        ("`int | null`", "a whole number"),
        ("`float | null`", "a number"),
        ("`int`", "a whole number"),
        ("`float`", "a number"),
        ("`str` of length <=", "a text of length up to"),
        (" >= ", " from "),
        (" <= ", " up to "),
        (" > ", " above "),
    ):
        what = what.replace(word, plain)
    return what.partition(", got ")[0]


def query_of(question: Record, **changed: object) -> str:
    """Return the shortest query string for a record, with some fields changed."""
    plain = {f.name: f.default for f in msgspec.structs.fields(question)}
    values = msgspec.structs.asdict(question) | changed
    stated = {
        name: value for name, value in values.items() if value is not None and value != plain[name]
    }
    return urlencode(
        {
            name: exact(value) if isinstance(value, float) else value
            for name, value in stated.items()
        }
    )


def exact(value: float) -> str:
    """Return the shortest text that parses to exactly this number."""
    return repr(value).removesuffix(".0")
