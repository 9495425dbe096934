"""A schedule's answer for the terminal."""

from trainpace.core.units import format_count
from trainpace.job import Answer
from trainpace.report.phrases import duration, number, usd
from trainpace.report.terminal import (
    print_lines,
    print_next,
    print_notes,
    print_table,
    print_verdict,
    words,
)
from trainpace.verbs.carried import carried
from trainpace.verbs.match import MatchRequest
from trainpace.verbs.schedule import ScheduleRequest

LEFT_OUT = ("samples", "epochs", "global_batch", "sequence_length", "checkpoint_every", "mtbf")
"""Stated in any case, no length of resnet50's, or counted otherwise there."""


def print_answer(a: Answer, asked: ScheduleRequest | None = None) -> None:
    _print_verdict(a)
    print_table((words(""), words("", least=16)), _rows(a))
    if a.speedups and a.time is not None:
        rows = [
            (
                f"{s.ratio:.4g}x",
                f"{s.percent_of_old_speed:.4g} %",
                f"{100 * s.share_of_old_time:.3g} %",
                duration(s.new_time_s(a.time.total_s)),
            )
            for s in a.speedups
        ]
        print_table(
            ("speed-up", "of the old speed", "of the old time", "total then"),
            rows,
            left=0,
            spaced=False,
        )
        print_lines("363 % means 3.63 times as fast (old time / new time), not 363 % faster.")
    if a.learning_rate is not None:
        advice = a.learning_rate
        print_lines(
            f"The global batch is {advice.new_global_batch}, and the learning rate was tuned at"
            f" {advice.old_global_batch}. Nothing is changed for you; these are the usual rules:"
        )
        for name, value, factor, source in (
            ("linear", advice.linear, advice.linear_factor, advice.linear_source),
            (
                "square root",
                advice.square_root,
                advice.square_root_factor,
                advice.square_root_source,
            ),
        ):
            shown = f"x {factor:.4g}" if value is None else f"{value:.4g}"
            print_lines(f"  {name}: {shown}, {source.partition(': ')[2]}")
        print_lines(f"  {advice.limit}")
    print_notes(*(f"Note: {note}." for note in a.notes))
    if a.execution is not None and a.schedule.samples and a.schedule.epochs:
        job = ["--samples", str(a.schedule.samples), "--epochs", f"{a.schedule.epochs:g}"]
        limits = carried(asked, MatchRequest, LEFT_OUT)
        command = [
            "trainpace",
            "match",
            "resnet50",
            *job,
            "--global-batch",
            str(a.execution.global_batch),
            *limits,
        ]
        print_next(
            command, "servers for this job; put your model, FILE.py:FUNCTION, in place of resnet50"
        )


def _print_verdict(a: Answer) -> None:
    if a.time is None:
        return
    cost = "" if a.cost_usd is None else f" for {usd(a.cost_usd)}"
    total = duration(a.time.total_s)
    if a.meets_limit is None or a.limit_s is None:
        print_verdict(f"The training takes {total}{cost}.")
        return
    limit = duration(a.limit_s)
    if "step_time" in a.solved and a.step_time_s is not None:
        step = duration(a.step_time_s)
        print_verdict(
            f"A step may take at most {step}, for the training to end within {limit}{cost}."
        )
    elif "samples" in a.solved:
        print_verdict(
            f"An epoch may have at most {a.schedule.samples:,} samples, for the training to end"
            f" within {limit}{cost}."
        )
    elif "micro_batch" in a.solved and a.execution is not None and "global_batch" in a.solved:
        at_least = f"The global batch must be at least {a.execution.global_batch:,}"
        print_verdict(f"{at_least}, for the training to end within {limit}{cost}.")
    elif a.meets_limit:
        print_verdict(f"Yes: {total}{cost} is within {limit}.", good=True)
    else:
        print_verdict(
            f"No: {total}{cost} is {duration(a.time.total_s - a.limit_s)} over {limit}.", good=False
        )


def _rows(a: Answer) -> list[tuple[str, str]]:
    e, t, rate, rows = a.execution, a.time, a.throughput_samples_per_s, []
    if e is not None:
        formula = (
            f"{e.micro_batch} micro-batch x {e.accumulation} accumulation x {e.data_parallel_size}"
            " data parallel"
        )
        batch_needed = "  <- needed" if {"micro_batch", "global_batch"} <= set(a.solved) else ""
        rows.append(("global batch", f"{e.global_batch:,} samples = {formula}{batch_needed}"))
        if e.data_parallel_size != e.world_size:
            sizes = f"(tp {e.tp} x pp {e.pp} x cp {e.cp}) = {e.data_parallel_size}"
            rows.append(("data parallel", f"{e.world_size} GPUs / {sizes}"))
        if a.epoch is not None:
            partial = a.epoch.last_step_samples != e.global_batch
            last = f", the last of {a.epoch.last_step_samples} samples" if partial else ""
            rows.append(("steps per epoch", f"{a.epoch.steps:,}{last}"))
    needed = "  <- needed" if "step_time" in a.solved else ""
    fits = "  <- fits" if "epochs" in a.solved else ""
    rows += [
        ("samples per epoch", f"{a.schedule.samples:,}  <- fit" if "samples" in a.solved else ""),
        ("epochs", "" if a.schedule.epochs is None else f"{a.schedule.epochs:g}{fits}"),
        ("steps", f"{t.steps:,}" if t is not None and t.steps else ""),
        ("step time", "" if a.step_time_s is None else f"{duration(a.step_time_s)}{needed}"),
    ]
    if a.step_time_s is not None and rate is not None:
        rows.append(("throughput", f"{number(rate)} samples/s{needed}"))
        if a.schedule.sequence_length:
            rows.append(("", f"{format_count(rate * a.schedule.sequence_length)} tokens/s"))
    if a.gpus_choice is not None:
        rows.append(("data-parallel GPUs", f"{a.gpus_choice.data_parallel_size:,}  <- needed"))
    if t is not None:
        parts = {
            "steps": t.stepping_s,
            "start-up": t.startup_s,
            "evaluation": t.evaluation_s,
            "checkpoints": t.checkpoint_s,
            "failures": t.failures_s,
        }
        shown = [f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds]
        rows += [
            ("runs in sequence", f"{t.repeats}" if t.repeats > 1 else ""),
            ("of which", ", ".join(shown) if len(shown) > 1 else ""),
            ("training time", duration(t.total_s)),
        ]
    return [(name, text) for name, text in (*rows, ("cost", usd(a.cost_usd, ""))) if text]
