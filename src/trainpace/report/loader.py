"""A measured loader, and samples computed once, for the terminal and as JSON."""

from collections.abc import Sequence
from typing import Any

import msgspec

from trainpace.core.records import to_jsonable
from trainpace.measure import LoaderAdvice, LoaderComparison, LoaderMeasurement, LoaderPoint
from trainpace.report.phrases import duration, interval, number, percent, plural
from trainpace.report.terminal import (
    Column,
    print_lines,
    print_next,
    print_notes,
    print_table,
    print_verdict,
    words,
)
from trainpace.shards import Damage, Estimate, Precomputed
from trainpace.workload import ModelSpec

_WORTH_PRECOMPUTING = 0.2
_WORTH_PRECOMPUTING_MS = 0.05
"""A sample of some KiB is read back in about a hundredth of a millisecond; the disk's room is not free either."""
MOST_LINES = 100
_SMALL_SHARE = 0.02
_BUSY_SHARE = 0.1


def print_loader(m: LoaderMeasurement, a: LoaderAdvice) -> None:
    dataset = f"{m.dataset} of {m.length:,} samples"
    print_lines(f"{m.target}: {dataset}, batch {m.batch_size}, {m.cores:g} cores, loader alone")
    print_verdict(verdict(m, a) + _doubt(m, a))
    columns = [
        words("workers", least=7),
        Column("batch ms"),
        Column("90 % of repeats", 2),
        Column("samples/s"),
        Column("model ms", 3),
        Column("start-up s", 1),
    ]
    columns += [] if a.compute_ms is None else [Column("step ms")]
    print_table(columns, [_cells(p, a) for p in m.points])
    if m.stages:
        stages = (
            words("in a sample"),
            Column("ms"),
            Column("share"),
            Column("CPU ms", 1),
            words("offline?"),
        )
        print_table(stages, _stage_rows(m), spaced=False)
    print_notes(_sample_in_words(m), *_variants_in_words(m))
    advice = next_step(m, a)
    whole = not any(s.kind == "dataset" for s in m.stages)
    if "trainpace precompute" in advice and ModelSpec.of(m.target).runs_code and whole:
        print_lines(f"To change: {advice.removeprefix('Next: ')}")
        estimate = ["trainpace", "precompute", m.target, "--out", "shards", "--estimate"]
        print_next(estimate, "what that costs and saves, estimated from some samples")
    else:
        print_lines(advice)


def verdict(m: LoaderMeasurement, a: LoaderAdvice) -> str:
    saved = (
        f"{duration(abs(a.saved_s_per_epoch))} an epoch"
        f" ({abs(a.saved_s_per_epoch) / a.epoch_now_s:.0%})"
    )
    if a.saved_s_per_epoch <= 0:
        saved = "nothing"
    step_ms = number(a.step_ms)
    if a.compute_ms is None:
        rate = number(1e3 * m.batch_size / a.step_ms)
        answer = f"Verdict: with {_workers(a.workers)} the loader alone gives {rate} samples/s"
        if a.worth_it:
            answer += (
                f", {a.now_ms / a.step_ms:.1f} times as many as with {_workers(a.workers_now)}"
            )
        answer += (
            "."
            if a.workers == 0
            else f". A step that computes for more than {step_ms} ms hides it."
        )
        return (
            answer
            if a.worth_it or len(m.points) == 1
            else f"{answer} Other numbers of workers would save {saved}."
        )
    data_ms = max(0.0, a.now_ms - a.compute_ms)
    answer = (
        f"Verdict: with {_workers(a.workers_now)} a step takes {number(a.now_ms)} ms, of which"
        f" {number(data_ms)} ms ({data_ms / a.now_ms:.0%}) is waiting for data."
    )
    if a.worth_it:
        return (
            f"{answer} With {_workers(a.workers)} it takes {step_ms} ms, which saves {saved},"
            " start-up included."
        )
    return answer if len(m.points) == 1 else f"{answer} No: other numbers of workers save {saved}."


def next_step(m: LoaderMeasurement, a: LoaderAdvice) -> str:
    steps = []
    if a.workers != a.workers_now:
        persistent = ", persistent_workers=True" if a.keep_workers else ""
        steps.append(f"DataLoader(..., num_workers={a.workers}{persistent})")
    elif a.keep_workers:
        startup = duration(a.startup_s)
        steps.append(
            f"persistent_workers=True, because starting the workers takes {startup} of every epoch"
        )
    if a.compute_ms is None and a.workers == 0:
        left_out = "workers load during it, which these figures leave out"
        steps.append(f"give --compute-ms, the compute time of a step: {left_out}")
    waiting = a.compute_ms is None or a.step_ms > a.compute_ms * 1.05
    if waiting and a.offline_share > _WORTH_PRECOMPUTING and a.offline_ms > _WORTH_PRECOMPUTING_MS:
        inner = [s.name for s in m.stages if s.offline and s.kind == "dataset"]
        of_what = f" of {' and '.join(inner)} as a dataset of its own," if inner else ","
        steps.append(
            f"trainpace precompute{of_what} which could save up to {number(a.offline_ms)} ms"
            f" ({a.offline_share:.0%}) of every sample, less the cost of reading it back"
        )
    elif waiting and m.stages and (a.limit == "cores" or not steps):
        slowest = max(m.stages, key=lambda s: s.wall_ms)
        why = (
            "the cores are fully used"
            if a.limit == "cores"
            else "other numbers of workers would save nothing"
        )
        steps.append(
            f"{why}, so make {slowest.name} cheaper: it is {m.share_of(slowest):.0%} of a sample"
        )
    if steps:
        return f"Next: {'; then '.join(steps)}."
    if waiting and a.compute_ms is not None:
        return (
            "Next: make a sample cheaper, as the step waits for data, and other numbers of workers"
            " would save nothing."
        )
    return "Next: nothing to gain from the loader; look at the compute."


def print_loader_comparison(c: LoaderComparison) -> None:
    print_verdict(comparison_verdict(c))
    columns = (
        words("ms a sample", least=16),
        Column(c.names[0]),
        Column(c.names[1]),
        Column("difference"),
        words("", 1),
    )
    named = [(part.name, part) for part in c.parts]
    named += [(f"{times.name}, {_workers(workers)}", times) for workers, times in c.alone.items()]
    rows = [
        (
            name,
            *map(number, times.ms),
            f"{times.more_ms:+.3g}",
            "within the noise" if times.is_noise else "",
        )
        for name, times in named
    ]
    print_table(columns, rows)
    for workers, times in list(c.alone.items())[:1]:
        passes = [
            f"{name} {count:,} samples in {duration(1e-3 * count * ms)}"
            for name, count, ms in zip(c.names, c.samples, times.ms, strict=True)
        ]
        print_lines(f"A whole pass with {_workers(workers)}: {', '.join(passes)}.")
    print_next(
        ["trainpace", "loader", c.names[c.slower]],
        "the slower one alone: how many workers it needs, and what else helps",
    )


def comparison_verdict(c: LoaderComparison) -> str:
    if c.are_alike:
        first, second = map(number, c.sample_ms)
        return f"Verdict: both are as fast: a sample takes {first} and {second} ms on one thread."
    slow, fast, part = c.sample_ms[c.slower], c.sample_ms[1 - c.slower], c.through
    return (
        f"Verdict: {c.names[c.slower]} is the slower one: a sample takes {number(slow)} ms on one"
        f" thread, {number(slow / fast)} times the {number(fast)} ms of {c.names[1 - c.slower]}."
        f" Most of the difference is in {part.name}: {number(abs(part.more_ms))} ms."
    )


def loader_json(m: LoaderMeasurement, a: LoaderAdvice) -> dict[str, Any]:
    return {
        **to_jsonable(m),
        "samples_per_second": {str(p.workers): p.samples_per_second for p in m.points},
        "advice": msgspec.to_builtins(a, str_keys=True),
        "verdict": verdict(m, a),
        "next": next_step(m, a),
    }


def _cells(p: LoaderPoint, a: LoaderAdvice) -> list[str]:
    cells = [
        f"{p.workers}{' ◀' if p.workers == a.workers else ''}",
        number(p.batch_ms),
        interval(p.interval_ms, ""),
        number(p.samples_per_second),
        number(p.predicted_ms, ""),
        f"{p.startup_s:.2f}" if p.workers else "",
    ]
    return cells if a.compute_ms is None else [*cells, number(a.step_ms_by_workers[p.workers])]


def _stage_rows(m: LoaderMeasurement) -> list[list[str]]:
    rows = []
    for s in m.stages:
        earlier = "no: the sample is random" if s.kind == "function" else "no: after a random one"
        offline = "yes" if s.offline else "no: random" if s.random else earlier
        name = (
            s.name
            if s.kind in ("", "dataset", "function", "transform", "transforms")
            else f"{s.name} ({s.kind})"
        )
        rows.append(
            [name, number(s.wall_ms), percent(m.share_of(s)), number(s.cpu_ms, ""), offline]
        )
    return rows


def _sample_in_words(m: LoaderMeasurement) -> str:
    s = m.sample
    parts = [f"{number(min(s.cpu_ms, s.wall_ms))} ms of CPU time"]
    if s.wait_ms > _SMALL_SHARE * s.wall_ms:
        parts.append(f"{number(s.wait_ms)} ms of waiting")
    if s.fetch_ms is not None:
        parts.append(
            f"{number(s.fetch_ms)} ms of reading when its {s.file_bytes / 1024:.0f} KiB are not in"
            " memory"
        )
    note, whole_gib = f" Note: {s.note}" if s.note else "", s.file_bytes * m.length / 2**30
    if not note and s.cold_wall_ms is not None and m.memory_gib is not None and whole_gib:
        so = "so memory holds them after the first epoch"
        if whole_gib >= 0.5 * m.memory_gib:
            so = "more than fits in memory: every epoch reads them from disk again"
        note = f" All files together are about {whole_gib:.2g} GiB, {so}."
    if s.delayed_ms > _BUSY_SHARE * s.wall_ms:
        note += f" Other work on this machine delayed it by {number(s.delayed_ms)} ms more."
    return f"A sample takes {', '.join(parts)} ({s.samples} samples, one thread).{note}"


def _variants_in_words(m: LoaderMeasurement) -> list[str]:
    if len(m.variants) < 2:
        return []
    base, gains = m.variants[0], []
    for p in m.variants[1:]:
        gain = p.samples_per_second / base.samples_per_second - 1
        setting = "pin_memory=True"
        if p.batch_size != base.batch_size:
            setting = f"batch {p.batch_size}"
        elif p.prefetch_factor != base.prefetch_factor:
            setting = f"prefetch_factor={p.prefetch_factor}"
        gains.append(f"{setting} {100 * gain:+.0f} %{'' if base.differs_from(p) else ' (noise)'}")
    return [f"Samples/s with {_workers(base.workers)} and one other setting: {', '.join(gains)}."]


def _doubt(m: LoaderMeasurement, a: LoaderAdvice) -> str:
    if m.sample.delayed_ms > _BUSY_SHARE * m.sample.wall_ms:
        return " Other work runs on this machine: measure again when it is idle."
    if a.workers == a.workers_now or m.point(a.workers_now).differs_from(m.point(a.workers)):
        return ""
    return " Repeats differ by as much: measure again on an idle machine."


def _workers(count: int) -> str:
    return plural(count, "worker") if count else "no workers"


def print_precomputed(done: Precomputed) -> None:
    if done.shards_computed:
        rate = number(done.samples_computed / done.seconds)
        print_verdict(
            f"Computed {done.samples_computed:,} samples in {duration(done.seconds)} ({rate}/s), as"
            f" {done.shards_computed} of {done.shards_planned} shards."
        )
    else:
        print_verdict("There was nothing left to compute.")
    if done.bad:
        print_lines(
            f"{done.bad:,} bad samples were skipped; bad_samples.jsonl lists their indices and the"
            " reasons."
        )
    if done.finished:
        print_lines(
            f"{done.folder}: {done.samples:,} samples in {done.shards} shards,"
            f" {format_bytes(done.total_bytes)}.",
            f'To read them: ShardDataset("{done.folder}", transform=...) or ShardStream, from'
            " trainpace.shards.",
        )
        print_next(
            ["trainpace", "precompute", "--verify", "--out", str(done.folder)], "checks every byte"
        )
    else:
        written = f"{done.shards} of {done.shards_planned} shards are written"
        print_lines(f"{written}. The part that finishes last writes the manifest.")


def print_damage(shards: int, damaged: Sequence[Damage], folder: str) -> None:
    if not damaged:
        print_verdict(f"Yes: all {shards} shards are intact.", good=True)
        return
    print_verdict(f"No: {len(damaged)} of {shards} shards are damaged.", good=False)
    more = len(damaged) - MOST_LINES
    print_notes(
        *(f"{one.file}: {one.problem}" for one in damaged[:MOST_LINES]),
        *([f"... and {more:,} more"] if more > 0 else []),
    )
    print_next(["trainpace", "precompute", "--repair", "--out", folder], "computes them again")


def print_estimate(e: Estimate) -> None:
    c = e.costs
    rows = [
        ("computing a sample", duration(c.compute_s), "one process"),
        (
            "reading it back",
            duration(c.read_s),
            f"from the page cache; {duration(c.read_cold_s)} from disk",
        ),
        ("precomputing once", duration(e.compute_once_s), f"{e.workers} workers"),
        ("space on disk", format_bytes(e.total_bytes), f"{format_bytes(c.free_bytes)} free"),
        ("an epoch now", duration(e.epoch_now_s), f"{e.workers} workers"),
        (
            "an epoch after",
            duration(e.epoch_after_s),
            "from the page cache" if e.from_cache else "from disk",
        ),
    ]
    shorter = (
        f"every epoch becomes {duration(e.saved_per_epoch_s)} shorter, which pays for itself after"
    )
    print_verdict(
        f"Yes: {shorter} {e.epochs_to_pay:.1f} epochs." if e.pays else f"No: {e.reason}.",
        good=e.pays,
    )
    columns = (words(""), "", words("", least=16))
    print_table(columns, rows, title=f"{c.samples:,} samples, {c.measured} of them measured")


def format_bytes(size: float) -> str:
    """MB below 100 MB, GB above."""
    return f"{number(size / 1e9)} GB" if size >= 1e8 else f"{number(size / 1e6)} MB"
