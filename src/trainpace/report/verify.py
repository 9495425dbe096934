"""Whether accumulation and ranks train as one big batch does: the table, and a verdict in words."""

from typing import Any

from trainpace.core.records import to_jsonable
from trainpace.report.phrases import number
from trainpace.report.terminal import (
    Column,
    print_lines,
    print_next,
    print_table,
    print_verdict,
    words,
)
from trainpace.run import Change, Equivalence, WayResult
from trainpace.verbs.carried import carried
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.verify import VerifyRequest

IN_WORDS: dict[Change, str] = {
    "fp32": "the number format: in fp32 they agree",
    "weight_by_samples": (
        "parts of unequal size whose mean losses are averaged without weights: weighted by samples"
        " they agree"
    ),
    "weight_by_targets": (
        "parts with unequal numbers of targets whose mean losses are averaged without weights:"
        " weighted by targets they agree"
    ),
    "sum": "a loss that sums over samples, and is averaged over parts: added up they agree",
    "no_hooks": (
        "hooks on gradients (such as clipping), which act on every part: without them they agree"
    ),
    "whole_batch_norm": (
        "BatchNorm, which normalises each part by its own statistics: with the whole batch's they"
        " agree"
    ),
    "no_dropout": "dropout, which draws different masks for parts: without it they agree",
    "fp64": "rounding that training amplifies: in fp64 they agree",
}
ADVICE: dict[Change, str] = {
    "fp32": (
        "Rounding of this size is normal for the format, and not an error of accumulation or"
        " parallelism."
    ),
    "weight_by_samples": (
        "Use a batch that divides evenly (drop_last), or weight each loss by its share of the"
        " samples."
    ),
    "weight_by_targets": (
        "Sum the loss over targets and divide by the number of targets in the whole batch."
    ),
    "sum": (
        "Do not divide the loss by the accumulation steps; with several ranks multiply it by their"
        " number, because the engine divides by it."
    ),
    "no_hooks": "Clip once a step, after the last backward pass and before the optimizer.",
    "whole_batch_norm": (
        "On GPUs torch.nn.SyncBatchNorm shares the statistics between ranks; accumulation needs"
        " GroupNorm or LayerNorm, or frozen statistics."
    ),
    "no_dropout": (
        "The masks are equally random either way, so the training is as good; only the draw"
        " differs."
    ),
    "fp64": (
        "Not an error of accumulation or parallelism: the optimizer or the model magnifies"
        " rounding."
    ),
}
WAY_IN_WORDS = {
    "accumulate": "accumulation",
    "data_parallel": "DataParallel (emulated)",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed ZeRO-2",
}


def print_equivalence(result: Equivalence, asked: VerifyRequest | None = None) -> None:
    q = result.question
    trained = f"{q.steps} steps of {q.batch} samples in {q.precision}"
    print_lines(f"{q.model}: {trained}, against one process and the whole batch")
    lines = verdict(result)
    if result.equal:
        first, *lines = lines
        print_verdict(f"Yes: {first[0].lower()}{first[1:]}", good=True)
    else:
        differing = [WAY_IN_WORDS[way.way] for way in result.ways if not way.equal]
        print_verdict(f"No: not equivalent training with {', '.join(differing)}.", good=False)
    columns = (
        words("trained as"),
        words("parts"),
        Column("largest relative difference"),
        words("where", 1),
        words("verdict", least=7),
    )
    rows = []
    for way in result.ways:
        parts = (
            " + ".join(map(str, way.sizes))
            if len(way.sizes) <= 4
            else f"{len(way.sizes)} x {way.sizes[0]}"
        )
        apart = "" if way.difference is None else f"{way.difference:.1e}"
        outcome = "failed" if way.failed else "equal" if way.equal else "differs"
        rows.append([WAY_IN_WORDS[way.way], parts, apart, way.worst, outcome])
    print_table(columns, rows)
    print_lines(*lines)
    if result.equal:
        same = carried(asked, ForecastRequest, ["batch", "accumulate", "timeout"])
        print_next(
            [
                "trainpace",
                "forecast",
                q.model,
                "--gpu",
                "A100",
                "--batch",
                str(max(q.sizes("ddp"))),
                *same,
            ],
            "what a part costs on a GPU; for the training, any way of dividing the batch is equally"
            " good",
        )
    elif not result.repeated and not any(way.failed for way in result.ways):
        same = carried(asked, VerifyRequest, ["batch", "accumulate"])
        again = [
            "trainpace",
            "verify",
            q.model,
            "--batch",
            str(q.batch),
            "--accumulate",
            str(q.parts),
        ]
        print_next([*again, *same], "again, after that change")


def verdict(result: Equivalence) -> list[str]:
    q = result.question
    if result.equal:
        moved = min(way.moved or 0.0 for way in result.ways)
        return [
            f"Equivalent training: the results differ by rounding only (at most {q.tolerance:g}),"
            f" while the weights moved by {moved:.1e}."
        ]
    lines = []
    if result.repeated:
        lines.append(
            "The model does not train the same way twice, even in one process: the difference is"
            f" {result.repeated:.1e}. Something draws random numbers outside the seeds of torch,"
            " numpy and random; make that reproducible first."
        )
    for way in result.ways:
        lines += [f"{WAY_IN_WORDS[way.way]}: {sentence}" for sentence in _explanation(way, result)]
    advised = dict.fromkeys(change for way in result.ways for change in way.cause)
    return lines + [ADVICE[change] for change in advised]


def _explanation(way: WayResult, result: Equivalence) -> list[str]:
    if way.failed:
        return [f"could not train. {way.failed}"]
    if way.equal:
        return ["the same training."]
    if way.cause:
        left = next(tried.difference for tried in way.tried if tried.changes == way.cause)
        return [f"{', and '.join(IN_WORDS[change] for change in way.cause)} ({left:.1e})."]
    if way.difference is None:
        return ["the weights or the loss became NaN: lower the learning rate."]
    tolerance = result.question.tolerance
    if way.difference <= tolerance:
        return [
            f"the weights moved by only {way.moved or 0.0:.1e}: too little to tell. Use more"
            " --steps."
        ]
    if result.repeated:
        return ["differs."]
    return [f"no cause was found. {_first_loss(way, result)}"]


def _first_loss(way: WayResult, result: Equivalence) -> str:
    if way.first_loss is None or not result.facts.losses:
        return ""
    whole = result.facts.losses[0]
    if abs(whole - way.first_loss) <= 10 * result.question.tolerance * abs(whole):
        return "The first loss is still the same: the gradients are not."
    return (
        f"Already the first loss differs, {number(way.first_loss)} in parts and {number(whole)} at"
        " once: the loss of a batch is not the mean of its parts' (a contrastive loss, say)."
    )


def equivalence_json(result: Equivalence) -> dict[str, Any]:
    return {**to_jsonable(result), "equal": result.equal, "verdict": verdict(result)}
