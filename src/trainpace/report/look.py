"""The first answer about a script, on one screen: how long it takes, where its steps' time goes, what to change, where else."""

from __future__ import annotations

import shlex
from typing import Any

from trainpace.core.outcome import Interval
from trainpace.core.records import to_jsonable
from trainpace.core.units import format_duration
from trainpace.diagnose import WORTH, unseen_in_words, workers_beside
from trainpace.report.diagnosis import saved_ms
from trainpace.report.phrases import (
    bracketed,
    duration,
    number,
    percent,
    plural,
    rate_in_words,
    span,
    usd,
)
from trainpace.report.restored import from_home, restored_notes
from trainpace.report.terminal import (
    Column,
    print_lines,
    print_next,
    print_table,
    print_verdict,
    words,
)
from trainpace.report.watch import trained_on
from trainpace.verbs.carried import carried
from trainpace.verbs.diagnose import DiagnoseRequest
from trainpace.verbs.look import Elsewhere, Looked, LookRequest

MOST_CAUSES = 4
MOST_CHANGES = 3
LEAST_SHARE = 0.02
NOTHING_SEEN = (
    f"Nothing seen here saves {percent(WORTH)} of a step. trainpace diagnose tries more than a look"
    " can; a lower precision or a faster device may help too."
)


def print_looked(looked: Looked, asked: LookRequest | None = None) -> None:
    d, first = looked.diagnosis, looked.watched.recording.ranks[0]
    print_verdict(
        f"{_whole(looked)} A step takes {number(d.step_ms)} ms{bracketed(_step(looked))}."
    )
    print_lines(*_conditions(looked))
    # without an intervention, what launches operators is not told from what computes
    named = {"compute": "forward and backward"}
    shares = [
        (named.get(s.cause, s.in_words), number(s.ms), percent(s.share), s.share)
        for s in d.shares
        if s.share >= LEAST_SHARE
    ]
    columns = (
        words("where a step's time goes", least=18),
        Column("ms"),
        Column("share"),
        words("", 1, 8),
    )
    print_table(columns, shares[:MOST_CAUSES])
    if d.advice:
        changes = [
            (
                a.title,
                saved_ms(a),
                percent(a.saves_ms / d.step_ms),
                duration(_saved_s(looked, a.saves_ms)),
            )
            for a in d.advice[:MOST_CHANGES]
        ]
        of = {
            "training": "the training",
            "epoch": "an epoch",
            "steps": plural(looked.length.steps, "step"),
        }
        columns = (
            words("what to change (estimated)", least=20),
            Column("saves a step"),
            Column("share", 2),
            Column(f"of {of[looked.length.of]}"),
        )
        print_table(columns, changes, spaced=False)
    else:
        print_lines(NOTHING_SEEN)
    _print_elsewhere(looked)
    command = looked.watched.recording.command
    diagnose = [
        "trainpace",
        "diagnose",
        *carried(asked, DiagnoseRequest, ["output"]),
        "--",
        *command,
    ]
    print_next(diagnose, "proves what slows it down, by taking one cause after another away")
    print_lines(f"Recorded in {from_home(looked.watched.folder)}")
    if first.steps < 2 * MOST_CAUSES:
        print_lines(f"Only {plural(first.steps, 'step')} were counted; --for 60s would say more.")


def look_json(looked: Looked) -> dict[str, Any]:
    return {
        "folder": str(looked.watched.folder),
        "command": list(looked.watched.recording.command),
        "seconds": looked.seconds,
        "seconds_low": looked.interval_s.low,
        "seconds_high": looked.interval_s.high,
        "length": to_jsonable(looked.length),
        "loading_ms": looked.loading_ms,
        "elsewhere": [_elsewhere_json(chosen) for chosen in looked.elsewhere],
        "not_elsewhere": looked.not_elsewhere,
        "busy": looked.busy,
        "diagnosis": to_jsonable(looked.diagnosis),
    }


def _elsewhere_json(chosen: Elsewhere) -> dict[str, Any]:
    m = chosen.match
    assert m.forecast.step is not None
    return {
        "role": chosen.role,
        "gpu": m.offer.device,
        "provider": m.offer.provider,
        "instance_type": m.offer.instance_type,
        "vcpus": m.offer.vcpus,
        "step_time_ms": m.forecast.step.total_ms,
        "hours": m.mean_hours,
        "hours_low": m.hours.low,
        "hours_high": m.hours.high,
        "usd": m.mean_usd,
    }


def _whole(looked: Looked) -> str:
    took = (
        f"{format_duration(looked.seconds)}{bracketed(looked.interval_s, format_duration)} on this"
        " machine"
    )
    length = looked.length
    steps = plural(length.steps, "step")
    if length.of == "steps":
        return f"{steps} take {took}."
    if length.of == "epoch":
        return f"An epoch of {steps} takes {took}."
    epochs = "" if length.epochs is None else f"{length.epochs:g} epochs, "
    return f"The whole training ({epochs}{steps}) takes {took}."


def _step(looked: Looked) -> Interval:
    d = looked.diagnosis
    return Interval(low=d.step_ms_low, high=d.step_ms_high, coverage=0.9, basis="blocks of steps")


def _conditions(looked: Looked) -> list[str]:
    """What the answer rests on, and what it leaves out."""
    recording, length = looked.watched.recording, looked.length
    first = recording.ranks[0]
    on = trained_on(first)
    samples = sum(rank.samples_per_step for rank in recording.ranks)
    tokens = looked.elsewhere[0].match.forecast.sequence_length if looked.elsewhere else None
    rate = (
        f", {rate_in_words(1000 * samples / looked.diagnosis.step_ms, tokens)}" if samples else ""
    )
    who = f", {len(recording.ranks)} ranks" if len(recording.ranks) > 1 else ""
    lines = [f"{shlex.join(recording.command)}: {plural(first.steps, 'step')} {on}{who}{rate}."]
    if length.of == "steps":
        lines.append(
            "How many steps the whole training has is not known: say it with --max-steps N."
        )
    elif length.of == "epoch":
        lines.append("How long the whole training is is not known: say it with --epochs N.")
    else:
        by = f"Length by {length.words}. " if length.words and length.words != "as you say" else ""
        unseen = unseen_in_words(first)
        none = f"{unseen.capitalize()} is counted: none was seen." if unseen else ""
        lines += [words_of] if (words_of := (by + none).strip()) else []
    by_input = (
        f"a batch is taken to be the first dimension of the model's input, {first.model_batch}."
    )
    by_input = "" if samples or not first.model_batch else by_input
    notes = [
        by_input,
        looked.busy,
        workers_beside(recording.ranks),
        *restored_notes(recording, looked.watched.folder),
    ]
    return lines + [f"Note: {note}" for note in notes if note]


def _saved_s(looked: Looked, saves_ms: float) -> float:
    return looked.seconds * saves_ms / looked.diagnosis.step_ms


def _print_elsewhere(looked: Looked) -> None:
    if not looked.elsewhere:
        print_lines(f"On cards for rent: {looked.not_elsewhere}")
        return
    rows = []
    for chosen in looked.elsewhere:
        m = chosen.match
        assert m.forecast.step is not None
        low, high = 3600 * m.hours.low, 3600 * m.hours.high
        rows.append(
            (
                m.offer.device,
                chosen.role,
                number(_step_ms(chosen, looked.length.steps)),
                duration(3600 * m.mean_hours),
                span(low, high, format_duration),
                _cents(m.mean_usd),
            )
        )
    startup_s = looked.elsewhere[0].match.time.startup_s
    columns = (
        words("a card for rent", least=12),
        words("", 3, 8),
        Column("step ms", 2),
        Column("time"),
        Column("90 % interval", 1),
        Column("cost"),
    )
    print_table(columns, rows, spaced=False)
    if startup_s:
        print_lines(
            f"Forecasts: a time includes {duration(startup_s)} to start, a step its waiting for"
            " data."
        )
    slowest = max(
        chosen.match.forecast.step.total_ms
        for chosen in looked.elsewhere
        if chosen.match.forecast.step
    )
    if looked.loading_ms is not None and looked.loading_ms > slowest:
        loader = looked.watched.recording.ranks[0].loader
        workers = plural(loader.workers if loader else 0, "loader worker")
        print_lines(
            f"They need a loader worker a vCPU: with {workers}, as now, data alone takes"
            f" {number(looked.loading_ms)} ms a step."
        )


def _cents(usd_in_all: float) -> str:
    return usd(usd_in_all) if usd_in_all >= 0.01 else "< 1 cent"


def _step_ms(chosen: Elsewhere, steps: int) -> float:
    """With what a step waits for its data."""
    step = chosen.match.forecast.step
    assert step is not None
    return step.total_ms + 1000 * chosen.match.time.data_wait_s / steps
