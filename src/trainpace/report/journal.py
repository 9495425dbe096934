"""The journal for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainpace.journal import Comparison, Difference, Entry, Ratio, Score, Scores, Sweep, printable
from trainpace.outcome import STEP_PARTS
from trainpace.report.columns import Column, words
from trainpace.report.terminal import print_lines, print_named, print_next, print_table, print_verdict
from trainpace.units import format_number

if TYPE_CHECKING:
    from trainpace.journal import Imported

_LISTED = (
    words("id", least=8), words("when (UTC)", 5, least=16), words("model", least=14), words("device", 2, least=20),
    Column("batch"), words("precision", 4), words("optimizer", 6), Column("step ms"), Column("interval", 1), Column("GiB", 7),
    words("outcome", 3, least=7),
)  # fmt: skip
_SAID_ONCE = ("device", "precision", "optimizer", "outcome")


def print_entries(entries: Sequence[Entry], total: int, place: str) -> None:
    """One line a run; what is the same in all of them is said once."""
    if not entries:
        print_verdict(f"No such runs in {place}.")
        print_lines("What trainpace measure and run measured is kept there; recordings of watch stay in their folders.")
        return
    print_verdict(f"{total:,} run{'' if total == 1 else 's'} in {place}{_shown(entries, total)}.")
    rows = [_line(entry) for entry in entries]
    same = [i for i, c in enumerate(_LISTED) if c.name in _SAID_ONCE and len({row[i] for row in rows}) == 1 < len(rows)]
    told = [i for i in range(len(_LISTED)) if i not in same]
    print_table([_LISTED[i] for i in told], [[row[i] for i in told] for row in rows])
    if same:
        print_lines(f"All: {', '.join(rows[0][i] for i in same)}.")
    print_next(
        f"trainpace journal show {entries[0].id[:8]}", "all that is known of a run; --limit and --offset list others"
    )


def _shown(entries: Sequence[Entry], total: int) -> str:
    return "" if total == len(entries) else f", of which {len(entries)} are shown"


def print_sweeps(sweeps: Sequence[Sweep]) -> None:
    """One line a sweep."""
    rows = [
        (s.id[:8], _when(s.created_at), _text(s.model), _text(s.device), ", ".join(map(str, s.batches)),
         _when(s.finished_at) if s.finished_at else "not finished")
        for s in sweeps
    ]  # fmt: skip
    print_verdict(f"{len(sweeps)} sweep{'' if len(sweeps) == 1 else 's'}.")
    columns = (
        words("id", least=8), words("when (UTC)", 2, least=16), words("model", least=14), words("device", 3, least=20),
        words("batches"), words("finished", 1, least=16),
    )  # fmt: skip
    print_table(columns, rows)
    if sweeps:
        print_next(f"trainpace journal list --sweep {sweeps[0].id[:8]}", "the runs of one")


def print_entry(entry: Entry) -> None:
    """All that is known of a run."""
    e, x = entry, entry.execution
    facts = [
        ("id", e.id), ("made", f"{e.created_at} by {e.kind}"), ("model", e.model),
        ("device", e.device if e.num_devices == 1 else f"{e.num_devices} x {e.device}"),
        ("execution", ", ".join(f"{name} {getattr(x, name)}" for name in _stated(x))),
        ("shape", ", ".join(f"{n} {v}" for n, v in (("sequence length", e.sequence_length), ("image", e.image_size)) if v)),
        ("mode", e.mode), ("outcome", e.outcome if not e.reason else f"{e.outcome}: {e.reason}"),
        ("step", _step(e)),
        ("parts", ", ".join(f"{n.removesuffix('_ms')} {_ms(getattr(e.step, n))}" for n in STEP_PARTS if getattr(e.step, n))
         if e.step else ""),
        ("steps timed", f"{len(e.step_times_ms)} after {len(e.warmup_ms)} of warm-up" if e.step_times_ms else ""),
        ("throughput", f"{format_number(e.samples_per_second)} samples/s" if e.samples_per_second else ""),
        ("memory", ", ".join(f"{n} {format_number(v)} GiB" for n, v in
                             (("peak", e.peak_memory_gib), ("reserved", e.reserved_memory_gib)) if v is not None)),
        ("forecast", _forecast(e)), ("sweep", e.sweep or ""), ("seed", "" if e.seed is None else str(e.seed)),
        ("commit", e.commit or ""), ("command", e.command), ("source", e.source), ("workload", e.workload_key or ""),
        *((key, value) for key, value in sorted(e.environment.items())), ("notes", e.notes),
    ]  # fmt: skip
    print_verdict(
        f"{e.outcome}: {_step(e) or 'nothing was timed'}"
        if e.outcome == "ok"
        else f"{e.outcome}: {printable(e.reason)}"
    )
    print_named("", [(_text(name), _text(value)) for name, value in facts if value])
    print_next(
        f"trainpace journal compare {e.id[:8]} ID", "this run and another, and whether they differ beyond the noise"
    )


def print_comparison(comparison: Comparison) -> None:
    """What differs, the parts, memory, and the verdict."""
    c = comparison
    print_verdict(_verdict(c))
    if c.conditions:
        print_table((words("differs"), words("A"), words("B")), [_difference(d) for d in c.conditions])
    else:
        print_lines("A and B ran under the same conditions, as far as they are stated.")
    for title, rows in (("part, ms", c.parts_ms), ("memory, GiB", c.memory_gib)):
        if rows:
            print_table((title, "A", "B"), [_difference(d) for d in rows], spaced=False)
    if c.ratios:
        columns = (
            Column("batch"),
            Column("A ms"),
            Column("B ms"),
            Column("B / A"),
            Column("90 % interval"),
            words("", 1),
        )
        print_table(columns, [_ratio(r) for r in c.ratios], spaced=False)
    if c.samples_per_second is not None and len(c.ratios) > 1:
        a, b = c.samples_per_second.a, c.samples_per_second.b
        print_lines(f"Best throughput: A {format_number(float(a))}, B {format_number(float(b))} samples/s.")


def print_imported(imported: Sequence[Imported], place: str) -> None:
    """What there is now, one line a file, and why runs were skipped."""
    if imported:
        new, there = (sum(getattr(one, name) for one in imported) for name in ("new", "already_there"))
        print_verdict(f"{new:,} new run{'' if new == 1 else 's'} in {place}, {there:,} there already.")
    for one in imported:
        skipped = sum(one.skipped.values())
        print_lines(
            f"{one.file} ({one.format}): {one.new:,} new, {one.already_there:,} there already"
            + (f", {skipped:,} skipped" if skipped else "")
        )
        print_lines(*(f"  {count:,} skipped: {printable(reason)}" for reason, count in one.skipped.items()))
    if imported:
        print_next("trainpace journal list", "the newest of them")


def print_scores(scores: Scores) -> None:
    """Errors overall, lately, by device and by model, in plain words."""
    s = scores.overall
    if s.mean_pct is None or s.median_pct is None or s.bias_pct is None:
        print_verdict("No run in the journal has a forecast that was made before it.")
        print_next(
            "trainpace measure resnet50", "measures beside a forecast; any FILE.py:FUNCTION in place of resnet50"
        )
        return
    way = "too long" if s.bias_pct > 0 else "too short"
    print_verdict(
        f"{s.n:,} forecasts were off by {s.mean_pct:.1f} % on average (median {s.median_pct:.1f} %)"
        f", typically {abs(s.bias_pct):.1f} % {way}."
    )
    for title, group in (("device", scores.by_device), ("model", scores.by_model)):
        columns = (
            words(title, least=16), Column("runs"), Column("mean error %"), Column("median %", 1), Column("bias %", 2),
            Column("in interval %"),
        )  # fmt: skip
        print_table(columns, [_score(one) for one in group], spaced=title == "device")
    if s.coverage_pct is not None:
        print_lines(
            f"Of {s.n_with_interval:,} with an interval, {s.coverage_pct:.0f} % of the measured steps were inside it."
        )
    if scores.lately.n < s.n and scores.lately.mean_pct is not None:
        print_lines(f"The last {scores.lately.n} were off by {scores.lately.mean_pct:.1f} % on average.")
    print_next("trainpace calibrate", "measures this machine anew, which forecasts for it rest on")


def _line(e: Entry) -> tuple[str, ...]:
    interval = f"{_ms(e.interval_ms.low)} to {_ms(e.interval_ms.high)}" if e.interval_ms else "-"
    x = e.execution
    return (
        e.id[:8], _when(e.created_at), _text(e.model), _text(e.device if e.num_devices == 1 else f"{e.num_devices} x {e.device}"),
        str(x.micro_batch) if x.accumulation == 1 else f"{x.micro_batch} x {x.accumulation}", x.precision, _text(x.optimizer),
        _ms(e.step_time_ms), interval, "-" if e.peak_memory_gib is None else format_number(e.peak_memory_gib), e.outcome,
    )  # fmt: skip


def _stated(execution: object) -> list[str]:
    """Settings that are not their defaults, and always the batch, precision and optimizer."""
    always = ("micro_batch", "precision", "optimizer")
    fields: tuple[str, ...] = execution.__struct_fields__  # type: ignore[attr-defined]
    plain = type(execution)()
    return [n for n in fields if n in always or getattr(execution, n) != getattr(plain, n)]


def _step(e: Entry) -> str:
    if e.step_time_ms is None:
        return ""
    if e.interval_ms is None:
        return f"{_ms(e.step_time_ms)} ms"
    i = e.interval_ms
    return f"{_ms(e.step_time_ms)} ms ({_ms(i.low)} to {_ms(i.high)} at {100 * i.coverage:.0f} %, {i.basis})"


def _forecast(e: Entry) -> str:
    if e.forecast_ms is None:
        return ""
    ends = f" ({_ms(e.forecast_low_ms)} to {_ms(e.forecast_high_ms)})" if e.forecast_low_ms is not None else ""
    off = f", off by {100 * (e.forecast_ms / e.step_time_ms - 1):+.1f} %" if e.step_time_ms else ""
    return f"{_ms(e.forecast_ms)} ms{ends}{off}{f', {e.forecast_basis}' if e.forecast_basis else ''}"


def _difference(d: Difference) -> tuple[str, str, str]:
    a, b = (format_number(v) if isinstance(v, float) else _text(v) or "-" for v in (d.a, d.b))
    return _text(d.name), a, b


def _ratio(r: Ratio) -> tuple[str, ...]:
    interval = "-" if r.low is None or r.high is None else f"{r.low:.3f} to {r.high:.3f}"
    words = {None: "noise not known", True: "beyond the noise", False: "within the noise"}
    return str(r.batch), _ms(r.a_ms), _ms(r.b_ms), f"{r.ratio:.3f}", interval, words[r.beyond_noise]


def _verdict(c: Comparison) -> str:
    if c.median_ratio is None:
        return "Nothing was timed on both sides, so the two cannot be compared."
    per_cent = 100 * (c.median_ratio - 1)
    how = f"{abs(per_cent):.1f} % {'more' if per_cent > 0 else 'less'}"
    told = [r.beyond_noise for r in c.ratios]
    if not any(told):
        unknown = all(one is None for one in told)
        return f"B takes {how} time a step" + (
            ", the noise is not known." if unknown else ", which is within the noise of the steps."
        )
    where = "" if len(told) == 1 else f" at {sum(map(bool, told))} of {len(told)} batch sizes"
    return f"B takes {how} time a step, beyond the noise of the steps{where}; runs of another day may differ more."


def _score(s: Score) -> tuple[str, ...]:
    numbers = (s.mean_pct, s.median_pct, s.bias_pct, s.coverage_pct)
    return (_text(s.name), str(s.n), *("-" if value is None else f"{value:.1f}" for value in numbers))


def _ms(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def _when(created_at: str) -> str:
    return created_at[:16].replace("T", " ")


def _text(value: str | float) -> str:
    return printable(str(value))
