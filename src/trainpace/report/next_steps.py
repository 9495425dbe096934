"""What to do after a forecast or a ranking, as a command under the same conditions."""

from __future__ import annotations

from collections.abc import Sequence

from trainpace.core.outcome import Forecast
from trainpace.offers import Match
from trainpace.report.lengths import lengths_of
from trainpace.report.sweep_charts import best_of
from trainpace.report.terminal import print_next
from trainpace.verbs.carried import as_typed, carried, lost
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.match import MatchRequest
from trainpace.verbs.measure import MeasureRequest
from trainpace.verbs.plan import PlanRequest
from trainpace.verbs.request import fields_of
from trainpace.workload import ModelSpec, Workload

BESIDE_THE_STEP = frozenset(
    {
        "samples",
        "epochs",
        "max_steps",
        "price",
        "startup",
        "evaluation_samples",
        "checkpoint_every",
        "mtbf",
        "step_variation",
        "data_gb",
        "download",
        "sample_bytes",
        "storage",
        "loader_rate",
        "workers",
        "data_from",
        "by",
        "deadline",
        "budget",
        "provider",
        "region",
        "max_nodes",
        "spot",
        "preempted_every",
        "machines",
        "only_machines",
        "num_gpus",
        "nodes",
        "network",
        "network_latency",
        "host",
        "hardware",
        "software",
        "attention",
        "transfer_from",
        "evidence",
        "timeout",
    }
)
"""What a measured step takes no account of, or finds as it is."""


def print_next_after_forecast(
    done: Sequence[Forecast], workload: Workload, asked: ForecastRequest | None
) -> None:
    """Real steps where the best one fits; where nothing does, the largest batch that would. Each under the conditions asked for;
    where the next verb does not know one of them, it is not the next."""
    spec, several = workload.model if asked is None else asked.model_name, bool(lengths_of(done))
    best = best_of(done)
    row = best or max(done, key=lambda row: row.largest_micro_batch or 0)
    e = row.execution
    device = _device_words(row, asked)
    length = ["--sequence-length", str(row.sequence_length)] if several else []
    fixed = ["gpu", "calibrated", "batch", "precision", *(["sequence_length"] if several else [])]
    format_ = ["--precision", e.precision]

    def again(*more: str, but: Sequence[str] = ()) -> list[str]:
        same = carried(asked, ForecastRequest, [*fixed, *but])
        return ["trainpace", "forecast", spec, *device, *format_, *length, *same, *more]

    if best is None:
        if row.largest_micro_batch:
            reason = "the largest batch that fits; --accumulate keeps the global batch"
            print_next(again("--batch", str(row.largest_micro_batch)), reason)
        elif e.activation_checkpointing == "none" and ModelSpec.of(spec).can_checkpoint:
            reason = "recomputes activations, which needs less memory"
            print_next(
                again("--checkpointing", "full", *_batch_words(asked), but=["checkpointing"]),
                reason,
            )
    elif best.num_devices > 1:
        if not lost(asked, PlanRequest, fixed):
            length_of_job = [] if asked is not None and asked.samples else ["--max-steps", "1000"]
            saved = "what to change, and what it saves" + (
                " in 1,000 steps" if length_of_job else ""
            )
            same = carried(asked, PlanRequest, fixed)
            steps = [
                *device,
                "--batch",
                str(e.micro_batch),
                *format_,
                *length,
                *same,
                *length_of_job,
            ]
            print_next(["trainpace", "plan", spec, *steps], saved)
    elif ModelSpec.of(spec).is_saved or _lost_by_measuring(asked, fixed):
        if workload.only_batch is None and all(
            one.execution.micro_batch == e.micro_batch for one in done
        ):
            batches = f"1:{max(2, min(best.largest_micro_batch or 64, 128))}"
            print_next(
                again("--batch", batches), "a range of batch sizes, and where the step time jumps"
            )
    else:
        same = carried(asked, MeasureRequest, [*fixed, "timeout"])
        measure = [
            "trainpace",
            "measure",
            spec,
            "--batch",
            str(e.micro_batch),
            *format_,
            *length,
            *same,
        ]
        if _is_this_machine(best):
            print_next(measure, "real steps on this machine, beside the forecast")
        else:
            print_next(
                [*measure, "--device", "cuda"],
                f"real steps, on a machine with this GPU: {best.device}",
            )


def _lost_by_measuring(asked: ForecastRequest | None, fixed: Sequence[str]) -> list[str]:
    return lost(asked, MeasureRequest, [*fixed, *BESIDE_THE_STEP])


def _batch_words(asked: ForecastRequest | None) -> list[str]:
    return (
        []
        if asked is None or not asked.batch
        else as_typed(fields_of(ForecastRequest)["batch"], asked.batch)
    )


def _is_this_machine(f: Forecast) -> bool:
    """A corrected forecast of this machine names no host either: it has a profile of its own."""
    return f.provenance == "calibrated" or (f.provenance == "transferred" and not f.host)


def _device_words(f: Forecast, asked: ForecastRequest | None) -> list[str]:
    if not _is_this_machine(f):
        return ["--gpu", f.device]
    if (
        asked is not None
        and asked.calibrated
        and not any(gpu.casefold() == "cpu" for gpu in asked.gpu)
    ):
        return ["--calibrated", asked.calibrated]
    return ["--gpu", "cpu"]


def print_next_after_match(first: Match, workload: Workload, asked: MatchRequest | None) -> None:
    """Real steps on the first option; where measuring would not be under these conditions, what its step consists of."""
    e, offer = first.forecast.execution, first.offer
    spec = workload.model if asked is None else asked.model_name
    fixed = ["batch", "precision", "accumulate", "gpu", "global_batch", "timeout"]
    steps = ["--batch", str(e.micro_batch), "--precision", e.precision]
    if not ModelSpec.of(spec).is_saved and not lost(
        asked, MeasureRequest, [*fixed, *BESIDE_THE_STEP]
    ):
        same = carried(asked, MeasureRequest, fixed)
        why = "on option 1, rented for a few minutes: real steps narrow the interval"
        print_next(["trainpace", "measure", spec, *steps, *same, "--device", "cuda"], why)
        return
    fleet = ["--gpu", offer.device, "--num-gpus", str(offer.count)]
    if first.nodes > 1:
        fleet += ["--nodes", str(first.nodes), "--network", f"{offer.network_gb_per_s:g}"]
    steps += ["--accumulate", str(e.accumulation)] if e.accumulation > 1 else []
    steps += ["--zero", str(e.zero_stage)] if e.zero_stage else []
    steps += ["--shard-size", str(e.shard_size)] if e.shard_size else []
    if asked is not None and asked.global_batch == e.global_batch:
        steps += ["--global-batch", str(e.global_batch)]
    same = carried(asked, ForecastRequest, [*fixed, "max_steps", "host", "checkpointing"])
    same += (
        ["--checkpointing", e.activation_checkpointing]
        if e.activation_checkpointing != "none"
        else []
    )
    print_next(
        ["trainpace", "forecast", spec, *fleet, *steps, *same],
        "option 1: where the time of its step goes",
    )
