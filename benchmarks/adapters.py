"""Step times of full fine-tuning, LoRA and QLoRA beside those that others measured, into benchmarks/results/adapters.md.

    python benchmarks/adapters.py ../shared/data [FOLDER]

The runs and their traces are those of `benchmarks.memory`; FOLDER keeps the traces for another run. Nothing is fitted on these
rows. A row that cannot be forecast is counted by its reason.
"""

import sys
import tempfile
from collections import Counter, defaultdict
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from memory import Case, case_of
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.outcome import Forecast
from trainpace.core.records import load
from trainpace.forecast import Forecaster, Target
from trainpace.workload import Workload, trace_many

RESULT = Path(__file__).parent / "results" / "adapters.md"
FILES = ("fms_acceleration", "qwen_readme_profiles", "peft_method_comparison")


def as_trained(case: Case) -> Case:
    """The case with what its source's scripts say of the training itself, beyond its table.

    fms-acceleration: `bf16: True` and `lora_dropout: 0.1` in scripts/benchmarks/scenarios.yaml and scenarios-granite.yaml, where
    PowerLM and every run on bitsandbytes has bf16 set over weights in bfloat16, which is autocast; peft 0.13 in its requirements.
    Which weights are in fp32 `benchmarks.memory` says. FOAK's kernels for norms, rotary embeddings, loss and adapters on
    bitsandbytes are fused by hand, which `compile` stands for; it has few for GPT-BigCode, and none for adapters without
    bitsandbytes. Qwen: lora_r 64 and lora_dropout 0.05 in finetune.py, `--bf16 True` in its shell
    scripts, with DeepSpeed's own bf16 engine, which has no autocast and casts adapters, on several GPUs; peft of 2023 makes
    adapters like the layer.
    """
    row, variant, execution = case.row, case.variant, case.execution
    how = variant.adaptation
    if row["file"] == "fms_acceleration":
        mixed = "PowerLM" in row["model"] or case.way == "QLoRA"
        words = row["model_variant_or_config"]
        how = how._replace(dropout=0.1) if how.adapter else how
        if "foak" in words and "bigcode" not in row["model"] and case.way != "LoRA":
            execution = replace(execution, compile=True)
    elif row["file"] == "qwen_readme_profiles":
        mixed = execution.world_size == 1
        how = how._replace(rank=64, dropout=0.05, as_the_model=True) if how.adapter else how
    else:
        return case
    return case._replace(
        variant=variant._replace(adaptation=how, autocast=mixed), execution=execution
    )


def timed_cases(data: Path, traces: Path) -> tuple[list[Case], Counter[tuple[str, str]]]:
    """The timed rows of FILES as cases, and the reasons of those that cannot be forecast, by file."""
    cases, left = [], Counter[tuple[str, str]]()
    for row in pq.read_table(data / "runs2.parquet").to_pylist():
        if row["file"] not in FILES or not row["step_time_ms"]:
            continue
        try:
            cases.append(
                as_trained(
                    case_of(row | {"peak_mem_gib": row["peak_mem_gib"] or float("nan")}, traces)
                )
            )
        except TrainpaceError as error:
            left[row["file"], str(error)] += 1
    return cases, left


def forecasts_of(
    cases: list[Case], traces: Path, left: Counter[tuple[str, str]]
) -> list[tuple[Case, Forecast, Workload]]:
    """The cases that have a time, with their forecasts and workloads; the others are counted in `left`."""
    keys = {
        case.trace_key: str(traces / f"{md5(repr(case.trace_key).encode()).hexdigest()}.json")
        for case in cases
    }
    reasons = trace_many({file: key for key, file in keys.items() if not Path(file).is_file()})
    loaded = {key: load(file, Workload) for key, file in keys.items() if file not in reasons}
    answers = []
    for case in cases:
        if case.trace_key not in loaded:
            left[case.row["file"], reasons[keys[case.trace_key]][:100]] += 1
            continue
        workload = loaded[case.trace_key]
        try:
            forecast = Forecaster(workload, Target(case.cluster, software=case.software)).forecast(
                case.execution
            )
        except TrainpaceError as error:
            left[case.row["file"], str(error)[:100]] += 1
            continue
        if forecast.step is None:
            left[case.row["file"], forecast.reason] += 1
        else:
            answers.append((case, forecast, workload))
    return answers


def error_pct(case: Case, forecast: Forecast) -> float:
    """(forecast - measured) / measured of the step, in per cent."""
    assert forecast.step is not None, "only cases with a time are compared"
    return 100 * (forecast.step.total_ms / case.row["step_time_ms"] - 1)


def line_of(case: Case, forecast: Forecast) -> str:
    """One run, its forecast and the forecast's parts."""
    s, e = forecast.step, case.execution
    assert s is not None, "only cases with a time are shown"
    return (
        f"{case.row['file'][:8]:8s} {case.row['model'][:28]:28s} {case.row['model_variant_or_config'][:34]:34s} {case.way:5s}"
        f" n{e.nproc_per_node} b{e.micro_batch} s{case.variant.sequence_length} z{e.zero_stage}"
        f" {case.row['step_time_ms']:7.0f} ms, forecast {s.total_ms:7.0f} {error_pct(case, forecast):+6.1f} % |"
        f" forward {s.forward_ms:.0f} backward {s.backward_ms:.0f} update {s.optimizer_ms:.0f}"
        f" exchanges {s.communication_ms:.0f} host {s.host_overhead_ms:.0f}"
    )


def table(answers: list[tuple[Case, Forecast, Workload]], left: Counter[tuple[str, str]]) -> str:
    """Errors by file and way as Markdown."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    inside: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for case, forecast, _ in answers:
        interval: Any = forecast.step_time_interval_ms
        for key in ((case.row["file"], case.way), ("all", case.way), ("all", "")):
            groups[key].append(error_pct(case, forecast))
            inside[key].append(
                interval is not None and interval.low <= case.row["step_time_ms"] <= interval.high
            )
    lines = ["# Step times of full fine-tuning, LoRA and QLoRA", ""]
    lines += [
        "Made by `python benchmarks/adapters.py`; errors in per cent of the measured step.",
        "",
    ]
    lines += [
        "| file | way | n | mean | median | bias | in 90 % interval |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for (file, way), errors in sorted(
        groups.items(), key=lambda item: (item[0][0] == "all", item[0])
    ):
        e = np.array(errors)
        share = 100 * np.mean(inside[file, way])
        lines.append(
            f"| {file} | {way} | {len(e)} | {np.abs(e).mean():.1f} | {np.median(np.abs(e)):.1f} | {e.mean():+.1f} | {share:.0f} |"
        )
    lines += ["", "Not forecast:", "", "| file | reason | rows |", "|---|---|--:|"]
    lines += [f"| {file} | {reason} | {n} |" for (file, reason), n in left.most_common()]
    return "\n".join(lines) + "\n"


def main(data: Path, traces: Path) -> None:
    cases, left = timed_cases(data, traces)
    answers = forecasts_of(cases, traces, left)
    for case, forecast, _ in answers:
        print(line_of(case, forecast), file=sys.stderr)
    RESULT.write_text(table(answers, left))
    print(RESULT.read_text())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(
            Path(sys.argv[1] if len(sys.argv) > 1 else "../shared/data"),
            Path(sys.argv[2] if len(sys.argv) > 2 else made),
        )
