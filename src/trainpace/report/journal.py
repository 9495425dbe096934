"""The journal, and errors of forecasts against measured runs, for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from trainpace.core.outcome import STEP_PARTS
from trainpace.forecast import Row, Summary
from trainpace.journal import Comparison, Difference, Entry, Scores, Sweep, printable
from trainpace.report.phrases import (
    bracketed,
    devices,
    interval,
    number,
    percent,
    plural,
    stated,
    when,
)
from trainpace.report.screen import in_details
from trainpace.report.sharing import print_lessons
from trainpace.report.terminal import (
    Column,
    print_lines,
    print_named,
    print_next,
    print_notes,
    print_table,
    print_verdict,
    words,
)
from trainpace.verbs.carried import carried
from trainpace.verbs.request import Request

if TYPE_CHECKING:
    from trainpace.journal import Imported

_LISTED = (
    words("id", least=8),
    words("when (UTC)", 5, least=16),
    words("model", least=14),
    words("device", 2, least=20),
    Column("batch"),
    words("precision", 4),
    words("optimizer", 6),
    Column("step ms"),
    Column("interval", 1),
    Column("GiB", 7),
    words("outcome", 3, least=7),
)
_MAYBE_ALIKE = ("device", "precision", "optimizer", "outcome")


def print_entries(
    entries: Sequence[Entry], total: int, place: str, asked: Request | None = None
) -> None:
    """One line a run; columns that are the same in all of them become one line."""
    if not entries:
        print_verdict(f"No such runs in {place}.")
        print_lines(
            "The journal keeps what trainpace measure and run measured; recordings of watch stay in"
            " their folders."
        )
        return
    shown = "" if total == len(entries) else f", of which {len(entries)} are shown"
    print_verdict(f"{plural(total, 'run')} in {place}{shown}.")
    rows = [_line(entry) for entry in entries]
    maybe = [i for i, column in enumerate(_LISTED) if column.name in _MAYBE_ALIKE]
    same = [i for i in maybe if len({row[i] for row in rows}) == 1 < len(rows)]
    others = [i for i in range(len(_LISTED)) if i not in same]
    print_table([_LISTED[i] for i in others], [[row[i] for i in others] for row in rows])
    if same:
        print_lines(f"All: {', '.join(rows[0][i] for i in same)}.")
    print_next(
        ["trainpace", "journal", "show", entries[0].id[:8], *_place(asked)],
        "everything about one run; --limit and --offset list others",
    )


def _place(asked: Request | None) -> list[str]:
    """The journal asked for, where it is not the usual one."""
    from trainpace.verbs.journal import JournalRequest

    return [] if asked is None else carried(asked, JournalRequest)


def print_sweeps(sweeps: Sequence[Sweep], asked: Request | None = None) -> None:
    rows = [
        (
            s.id[:8],
            when(s.created_at),
            _text(s.model),
            _text(s.device),
            ", ".join(map(str, s.batches)),
            when(s.finished_at) if s.finished_at else "not finished",
        )
        for s in sweeps
    ]
    print_verdict(f"{plural(len(sweeps), 'sweep')}.")
    columns = (
        words("id", least=8),
        words("when (UTC)", 2, least=16),
        words("model", least=14),
        words("device", 3, least=20),
        words("batches"),
        words("finished", 1, least=16),
    )
    print_table(columns, rows)
    if sweeps:
        print_next(
            ["trainpace", "journal", "list", "--sweep", sweeps[0].id[:8], *_place(asked)],
            "the runs of one sweep",
        )


def print_entry(entry: Entry, asked: Request | None = None) -> None:
    e, always = entry, ("micro_batch", "precision", "optimizer")
    step = "" if e.step_time_ms is None else f"{number(e.step_time_ms)} ms"
    if step and (i := e.interval_ms) is not None:
        step += bracketed(i, after=f" at {percent(i.coverage)}, {i.basis}")
    parts = {name.removesuffix("_ms"): getattr(e.step, name, 0.0) for name in STEP_PARTS}
    memory = {"peak": e.peak_memory_gib, "reserved": e.reserved_memory_gib}
    facts = [
        ("id", e.id),
        ("made", f"{e.created_at} by {e.kind}"),
        ("model", e.model),
        ("device", devices(e.num_devices, e.device)),
        ("execution", ", ".join(f"{name} {value}" for name, value in stated(e.execution, always))),
        (
            "shape",
            ", ".join(
                f"{n} {v}"
                for n, v in (("sequence length", e.sequence_length), ("image", e.image_size))
                if v
            ),
        ),
        ("mode", e.mode),
        ("loss", e.loss or ""),
        ("outcome", e.outcome if not e.reason else f"{e.outcome}: {e.reason}"),
        ("step", step),
        ("parts", ", ".join(f"{name} {number(ms)}" for name, ms in parts.items() if ms)),
        (
            "steps timed",
            (
                f"{len(e.step_times_ms)} after {len(e.warmup_ms)} of warm-up"
                if e.step_times_ms
                else ""
            ),
        ),
        ("throughput", f"{number(e.samples_per_second)} samples/s" if e.samples_per_second else ""),
        (
            "memory",
            ", ".join(
                f"{name} {number(gib)} GiB" for name, gib in memory.items() if gib is not None
            ),
        ),
        ("forecast", _forecast(e)),
        ("sweep", e.sweep or ""),
        ("seed", "" if e.seed is None else str(e.seed)),
        ("commit", e.commit or ""),
        ("command", e.command),
        ("source", e.source),
        ("workload", e.workload_key or ""),
        *sorted(e.environment.items()),
        ("notes", e.notes),
    ]
    print_verdict(
        f"{e.outcome}:"
        f" {(step or 'nothing was timed') if e.outcome == 'ok' else printable(e.reason)}"
    )
    print_named("", [(_text(name), _text(value)) for name, value in facts if value])
    print_next(
        ["trainpace", "journal", "compare", e.id[:8], "ID", *_place(asked)],
        "this run with another: do they differ by more than the noise?",
    )


def print_comparison(c: Comparison) -> None:
    print_verdict(_verdict(c))
    if c.conditions:
        print_table(
            (words("differs"), words("A"), words("B")), [_difference(d) for d in c.conditions]
        )
    else:
        print_lines("A and B ran under the same conditions, as far as these were recorded.")
    for title, rows in (("part, ms", c.parts_ms), ("memory, GiB", c.memory_gib)):
        if rows:
            print_table((title, "A", "B"), [_difference(d) for d in rows], spaced=False)
    if c.ratios:
        columns = (*map(Column, ("batch", "A ms", "B ms", "B / A", "90 % interval")), words("", 1))
        ratios = [
            (
                str(r.batch),
                number(r.a_ms),
                number(r.b_ms),
                f"{r.ratio:.3f}",
                "-" if r.low is None or r.high is None else f"{r.low:.3f} to {r.high:.3f}",
                _NOISE[r.beyond_noise],
            )
            for r in c.ratios
        ]
        print_table(columns, ratios, spaced=False)
    if c.samples_per_second is not None and len(c.ratios) > 1:
        a, b = c.samples_per_second.a, c.samples_per_second.b
        print_lines(f"Best throughput: A {number(float(a))}, B {number(float(b))} samples/s.")


def print_imported(imported: Sequence[Imported], place: str, asked: Request | None = None) -> None:
    if imported:
        new, there = (
            sum(getattr(one, name) for one in imported) for name in ("new", "already_there")
        )
        print_verdict(f"{plural(new, 'new run')} in {place}, {there:,} there already.")
    for one in imported:
        skipped = sum(one.skipped.values())
        left_out = f", {skipped:,} skipped" if skipped else ""
        print_notes(
            f"{one.file} ({one.format}): {one.new:,} new, {one.already_there:,} there"
            f" already{left_out}",
            *(f"  {count:,} skipped: {printable(reason)}" for reason, count in one.skipped.items()),
        )
        if one.lessons is not None:
            print_lessons(one.lessons)
    if imported:
        print_next(["trainpace", "journal", "list", *_place(asked)], "the newest runs")


def print_scores(scores: Scores, asked: Request | None = None) -> None:
    s = scores.overall
    if s.mean_pct is None:
        print_verdict("No run in the journal has a forecast that was made before it.")
        print_next(
            ["trainpace", "measure", "resnet50", *_place(asked)],
            "measures beside a forecast; FILE.py:FUNCTION for your own model",
        )
        return
    print_verdict(f"{s.n:,} forecasts {_off_by('were', s.mean_pct, s.median_pct, s.bias_pct)}.")
    for title, group in (("device", scores.by_device), ("model", scores.by_model)):
        columns = (
            words(title, least=16),
            Column("runs"),
            Column("mean error %"),
            Column("median %", 1),
            Column("bias %", 2),
            Column("in interval %"),
        )
        rows = [
            _errors(_text(s.name), s.n, s.mean_pct, s.median_pct, s.bias_pct, s.coverage_pct)
            for s in group
        ]
        print_table(columns, rows, spaced=title == "device")
    if s.coverage_pct is not None:
        inside = f"{s.coverage_pct:.0f} % of the measured steps were inside it"
        print_lines(f"Of {s.n_with_interval:,} with an interval, {inside}.")
    if scores.lately.n < s.n and scores.lately.mean_pct is not None:
        print_lines(
            f"The last {scores.lately.n} were off by {scores.lately.mean_pct:.1f} % on average."
        )
    print_next("trainpace calibrate", "measures this machine again, on which its forecasts rest")


def _line(e: Entry) -> tuple[str, ...]:
    x = e.execution
    return (
        e.id[:8],
        when(e.created_at),
        _text(e.model),
        _text(devices(e.num_devices, e.device)),
        str(x.micro_batch) if x.accumulation == 1 else f"{x.micro_batch} x {x.accumulation}",
        x.precision,
        _text(x.optimizer),
        number(e.step_time_ms),
        interval(e.interval_ms),
        number(e.peak_memory_gib),
        e.outcome,
    )


def _forecast(e: Entry) -> str:
    if e.forecast_ms is None:
        return ""
    ends = (
        f" ({number(e.forecast_low_ms)} to {number(e.forecast_high_ms)})"
        if e.forecast_low_ms is not None
        else ""
    )
    off = f", off by {100 * (e.forecast_ms / e.step_time_ms - 1):+.1f} %" if e.step_time_ms else ""
    return (
        f"{number(e.forecast_ms)}"
        f" ms{ends}{off}{f', {e.forecast_basis}' if e.forecast_basis else ''}"
    )


def _difference(d: Difference) -> tuple[str, str, str]:
    a, b = (number(v) if isinstance(v, float) else _text(v) or "-" for v in (d.a, d.b))
    return _text(d.name), a, b


_NOISE = {None: "noise not known", True: "beyond the noise", False: "within the noise"}


def _verdict(c: Comparison) -> str:
    if c.median_ratio is None:
        return "Nothing was timed on both sides, so the two cannot be compared."
    per_cent = 100 * (c.median_ratio - 1)
    answer = f"B takes {abs(per_cent):.1f} % {'more' if per_cent > 0 else 'less'} time a step"
    beyond = [r.beyond_noise for r in c.ratios]
    if not any(beyond):
        unknown = all(one is None for one in beyond)
        return (
            f"{answer}; the noise is not known."
            if unknown
            else f"{answer}, which is within the noise of the steps."
        )
    where = "" if len(beyond) == 1 else f" at {sum(map(bool, beyond))} of {len(beyond)} batch sizes"
    return (
        f"{answer}, beyond the noise of the steps{where}; runs on different days may differ more."
    )


def _text(value: str | float) -> str:
    return printable(str(value))


WORST = 10


def print_validation(
    rows: Sequence[Row], overall: Summary, groups: Mapping[str, Sequence[Summary]]
) -> None:
    if overall.mape is None:
        print_verdict(f"No: none of {overall.unsupported} runs could be forecast.", good=False)
    else:
        c = overall.coverage
        held = "" if c is None else f"; {c:.0f} % of the measurements lie in the 90 % interval"
        print_verdict(
            f"{overall.n:,} forecasts"
            f" {_off_by('are', overall.mape, overall.median, overall.bias)}{held}."
        )
    for name, group in groups.items():
        columns = (
            words(name, least=16),
            Column("runs"),
            Column("mean %"),
            Column("median %"),
            Column("95th %", 2),
            Column("bias %", 1),
            Column("in interval %"),
            Column("half width %", 4),
            Column("memory %", 3),
        )
        shown = [
            *(s for s in group if s.n or s.unsupported),
            *([overall] if name == "file" else []),
        ]
        errors = (
            (s, (s.mape, s.median, s.p95, s.bias, s.coverage, s.half_width, s.memory_mape))
            for s in shown
        )
        table = columns, [_errors(s.name, s.n, *figures) for s, figures in errors]
        with nullcontext() if name == "file" else in_details(f"the errors by {name}"):
            print_table(*table, spaced=name == "file")
    failed = sorted(
        (row for row in rows if row.error_pct is not None),
        key=lambda row: -abs(row.error_pct or 0.0),
    )
    worst = [
        (
            row.model,
            devices(row.num_gpus, row.gpu),
            row.precision,
            str(row.batch),
            number(row.measured_ms),
            number(row.forecast_ms),
            f"{row.error_pct:+.0f}",
        )
        for row in failed[:WORST]
    ]
    worst_columns = (
        words("worst", least=16),
        words("GPU"),
        words("precision", 1),
        Column("batch", 2),
        Column("measured ms"),
        Column("forecast ms"),
        Column("error %"),
    )
    print_table(worst_columns, worst, spaced=False)
    reasons = Counter(row.unsupported for row in rows if row.unsupported)
    print_notes(*(f"{count} not forecast: {reason}" for reason, count in reasons.most_common(8)))
    print_lines(
        "Errors are (forecast - measured) / measured. In interval: share of measurements inside the"
        " forecast's 90 % interval."
    )


def _off_by(were: str, mean: float, median: float | None, bias: float | None) -> str:
    assert median is not None
    assert bias is not None
    too = "long" if bias > 0 else "short"
    return (
        f"{were} off by {mean:.1f} % on average (median {median:.1f} %, typically {abs(bias):.1f} %"
        f" too {too})"
    )


def _errors(name: str, n: int, *percentages: float | None) -> tuple[str, ...]:
    return (name, str(n), *("-" if value is None else f"{value:.1f}" for value in percentages))
