"""Peaks of memory beside those that others measured: by file and way of training, into benchmarks/results/memory.md.

    python -m benchmarks.memory ../shared/data [FOLDER]

FOLDER keeps the traces for another run. Nothing is fitted on these rows. Configurations of models are their published ones. A
row that cannot be forecast is counted by its reason.
"""

import contextlib
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from hashlib import md5
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from fitting.prepare import prepared_case

from trainpace.errors import TrainpaceError
from trainpace.execution import Execution, Form
from trainpace.forecast import Forecaster, Target
from trainpace.hardware import Cluster, find_device
from trainpace.records import load
from trainpace.software import Software
from trainpace.trace import trace_many
from trainpace.validation import Run, read_runs
from trainpace.workload import Adaptation, Variant, Workload, form_of

RESULT = Path(__file__).parent / "results" / "memory.md"


def _llama(hidden: int, wide: int, layers: int, heads: int, keys: int, words: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": words, "max_position_embeddings": 8192,
        "rope_theta": 10000.0, **more,
    }  # fmt: skip


_QWEN = {"model_type": "qwen2", "tie_word_embeddings": False}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bigcode/gpt_bigcode-santacoder": {
        "model_type": "gpt_bigcode", "n_embd": 2048, "n_head": 16, "n_layer": 24, "n_inner": 8192, "n_positions": 2048,
        "vocab_size": 49280, "multi_query": True,
    },
    "ibm/PowerLM-3b": _llama(2304, 9216, 40, 36, 36, 49152, tie_word_embeddings=True),
    "mistralai/Mistral-7B-v0.1": _llama(4096, 14336, 32, 32, 8, 32000),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24, 8, 128256, head_dim=128, tie_word_embeddings=True),
    "Qwen-1.8B": _llama(2048, 5504, 24, 16, 16, 151936, **_QWEN),
    "Qwen-7B": _llama(4096, 11008, 32, 32, 32, 151936, **_QWEN),
    "Qwen-14B": _llama(5120, 13696, 40, 40, 40, 152064, **_QWEN),
    "Qwen-72B": _llama(8192, 24576, 80, 64, 64, 152064, **_QWEN),
    "Llama-2-70B": _llama(8192, 28672, 80, 64, 8, 32000),
    "Llama2-7B": _llama(4096, 11008, 32, 32, 32, 32000),
    "Llama3-8B": _llama(4096, 14336, 32, 32, 8, 128256),
}  # fmt: skip
"""Published configurations. Qwen's first generation is Qwen2's with as many keys as queries."""
_NAMES = (
    ("llama-2-70b", "Llama-2-70B"),
    ("llama3-8b", "Llama3-8B"),
    ("llama2-7b", "Llama2-7B"),
    ("llama-3.2-3b", "meta-llama/Llama-3.2-3B"),
)


class Case(NamedTuple):
    """A measured peak, ready to be forecast. gib: the peak, None where the run ran out of memory."""

    row: dict[str, Any]
    spec: str
    variant: Variant
    execution: Execution
    cluster: Cluster
    software: Software
    gib: float | None
    kind: str
    way: str

    @property
    def trace_key(self) -> tuple[str, Form, Variant]:
        return self.spec, form_of(self.execution.precision), self.variant


def spec_of(row: dict[str, Any], folder: Path) -> str:
    """The model's spec. Raises TrainpaceError where no definition is known."""
    if row["model_spec"]:
        return str(row["model_spec"])
    name = row["model"] or ""
    known = name if name in CONFIGURATIONS else next((k for word, k in _NAMES if word in name.casefold()), None)
    if known is None:
        raise TrainpaceError("no definition of the model")
    path = folder / (known.replace("/", "_") + ".json")
    path.write_text(json.dumps(CONFIGURATIONS[known]))
    return f"transformers:{path}"


def adaptation_of(text: str) -> tuple[Adaptation, str]:
    """How a run was adapted, and the way in a word."""
    lower = text.casefold()
    if "gptq" in lower:
        raise TrainpaceError("GPTQ's weights")
    if "q-lora" in lower:  # Qwen's
        raise TrainpaceError("GPTQ's weights")
    quantised = "bnb" in lower or "qlora" in lower
    if "lora" not in lower and not quantised:
        return Adaptation(), "full"
    rank = re.search(r"r=(\d+)", lower)
    targets = re.search(r"targets=([\w ]+)", text)
    names = ",".join(targets[1].split()) if targets else "all-linear"
    how = Adaptation("lora", int(rank[1]) if rank else 16, names, weights="nf4_double" if quantised else "")
    return how, "QLoRA" if quantised else "LoRA"


def case_of(row: dict[str, Any], folder: Path) -> Case:
    """The case of a row. Raises TrainpaceError with the reason why it cannot be forecast."""
    text = f"{row['model_variant_or_config'] or ''}"
    if re.search(r"moe-|ep\d|mixtral", f"{text} {row['model']}".casefold()):
        raise TrainpaceError("experts")
    kind = (row["mem_kind"] or "").casefold()
    gib = row["peak_mem_gib"]
    if gib is None and not row["oom"]:
        raise TrainpaceError("no peak")
    image = bool(row["img_size"])
    if not row["gpu_canonical"]:
        raise TrainpaceError("no GPU")
    if not row["batch_per_gpu"] or not (row["seq_len"] or image):
        raise TrainpaceError("no batch or length")
    how, way = adaptation_of(text)
    if "LoRA (emb)" in text:
        raise TrainpaceError("embedding and head trained whole beside LoRA")
    if how.adapter and "gpt_bigcode" in (row["model"] or ""):
        how = how._replace(targets="c_attn")
    elif how.targets != "all-linear":
        how = how._replace(targets=",".join(name for name in how.targets.split(",") if name != "c_attn"))
    gpus = int(row["num_gpus"] or 1)
    fsdp = "FSDP" in (row["parallelism"] or "")
    zero = re.search(r"ZeRO.?(\d)", row["parallelism"] or "", re.IGNORECASE)
    if zero is None and "zero" in text.casefold():
        zero = re.search(r"zero.?(\d)", text, re.IGNORECASE)
    length = int(row["seq_len"]) if row["seq_len"] else None
    recomputes = "checkpointing on" in (row["notes"] or "") or "gradient checkpointing" in text
    optimizer = {"bnb 8-bit": "adamw_8bit", "ao 8-bit": "adamw_torch_8bit", "ao 4-bit": "adamw_torch_4bit"}.get(
        row["optimizer"] or "", "sgd_momentum" if "SGD" in (row["optimizer"] or "") else "adamw"
    )
    precision = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}.get(row["precision"] or "", "bf16")
    if "autocast" in (row["notes"] or "").casefold():
        precision = "amp_bf16"
    execution = Execution(
        micro_batch=int(row["batch_per_gpu"]), accumulation=int(row["grad_accum"] or 1), precision=precision,  # type: ignore[arg-type]
        nproc_per_node=gpus, zero_stage=3 if fsdp else int(zero[1]) if zero else 0,  # type: ignore[arg-type]
        activation_checkpointing="full" if recomputes else "none", optimizer=optimizer, compile=row["compile"] == "compile",
        pure_16_bit=row["file"] == "fms_acceleration",
    )  # fmt: skip
    variant = Variant(optimizer, length, int(row["img_size"]) if image else None, adaptation=how)
    fused = "fused" if "foak" in text and "baseline" not in text else None
    cluster = Cluster(device=find_device(row["gpu_canonical"]), devices_per_node=gpus)
    peak = "allocated" if "allocated" in kind else "reserved" if "reserved" in kind else "device"
    software = Software(cross_entropy=fused)  # type: ignore[arg-type]
    return Case(row, spec_of(row, folder), variant, execution, cluster, software, gib, peak, way)


def forecast_gib(case: Case, workload: Workload) -> tuple[float, Any]:
    """(the forecast peak in the row's own kind of memory, the whole forecast)."""
    forecast = Forecaster(workload, Target(case.cluster, software=case.software)).forecast(case.execution)
    m = forecast.memory
    assert m is not None, "one rank's memory is always forecast"
    return {"allocated": m.allocated_gib, "reserved": m.reserved_gib, "device": m.device_gib}[case.kind], forecast


def main(data: Path, traces: Path) -> None:
    rows = pq.read_table(data / "runs2.parquet").to_pylist()
    left: Counter[tuple[str, str]] = Counter()
    cases: list[Case] = []
    for row in rows:
        if row["peak_mem_gib"] is None and not row["oom"]:
            continue
        try:
            cases.append(case_of(row, traces))
        except TrainpaceError as error:
            left[row["file"], str(error)] += 1
    keys = {case.trace_key: str(traces / f"{md5(repr(case.trace_key).encode()).hexdigest()}.json") for case in cases}
    reasons = trace_many({file: key for key, file in keys.items() if not Path(file).is_file()})
    print(f"{len(cases)} cases, {len(keys)} traces, {len(reasons)} not traced", file=sys.stderr)
    loaded = {key: load(file, Workload) for key, file in keys.items() if file not in reasons}
    results = []
    for c in cases:
        if c.trace_key not in loaded:
            left[c.row["file"], reasons[keys[c.trace_key]][:100]] += 1
            continue
        try:
            results.append((c, *forecast_gib(c, loaded[c.trace_key])))
        except TrainpaceError as error:
            left[c.row["file"], str(error)[:100]] += 1
    for c, gib, f in results:
        print(line_of(c, gib, f), file=sys.stderr)
    answers = fit_cases(data, traces)
    RESULT.write_text(table(results, left) + (fit_table(answers) if answers else ""))
    print(RESULT.read_text())


def fit_cases(data: Path, traces: Path) -> list[tuple[Run, bool, float]]:
    """(run, whether it ran, forecast probability to fit) of languini's GPTs, whose batches grow until they run out of memory."""
    runs = read_runs(data / "measured_runs.parquet")
    runs = [run for run in runs if run.file == "languini_throughput"]
    cases = []
    for run in runs:
        with contextlib.suppress(TrainpaceError):
            cases.append((run, prepared_case(run, data, traces)))
    keys = {case.trace_key: str(traces / f"{md5(repr(case.trace_key).encode()).hexdigest()}.json") for _, case in cases}
    reasons = trace_many({file: key for key, file in keys.items() if not Path(file).is_file()})
    loaded = {key: load(file, Workload) for key, file in keys.items() if file not in reasons}
    answers = []
    for run, case in cases:
        if case.trace_key in loaded:
            forecaster = Forecaster(loaded[case.trace_key], Target(case.cluster, software=case.software))
            probability = forecaster.forecast(case.execution).fit_probability
            assert probability is not None, "the card's memory is known"
            answers.append((run, run.step_time_ms is not None, probability))
    return answers


def fit_table(answers: list[tuple[Run, bool, float]]) -> str:
    """How often runs fitted, by the probability that was forecast."""
    lines = [
        "",
        "## Fits or not",
        "",
        "Languini's GPTs on RTX 3090, A100 and P100, batches up to those that ran out of memory.",
        "",
    ]
    lines += ["| forecast probability | runs | forecast | fitted |", "|---|--:|--:|--:|"]
    edges = (0.0, 0.05, 0.2, 0.5, 0.8, 0.95, 1.0 + 1e-9)
    for low, high in pairwise(edges):
        some = [(ran, p) for _, ran, p in answers if low <= p < high]
        if some:
            ran, p = np.array(some, dtype=float).T
            lines.append(
                f"| {low:.2f} to {min(high, 1):.2f} | {len(some)} | {100 * p.mean():.0f} % | {100 * ran.mean():.0f} % |"
            )
    right = np.array([ran == (p >= 0.5) for _, ran, p in answers])
    out = np.array([not ran for _, ran, _ in answers])
    close = np.array([0.005 < p < 0.995 for _, _, p in answers])
    for what, rows in (("all", np.ones_like(out)), ("runs that ran out", out), ("runs near the limit", close)):
        lines += ["", f"Right of {what}: {100 * right[rows].mean():.1f} % of {rows.sum()}."]
    return "\n".join(lines) + "\n"


def line_of(c: Case, gib: float, f: Any) -> str:
    """One row, its forecast, and what both are made of."""
    e, m = c.execution, f.memory
    error = f"{100 * (gib / c.gib - 1):+6.1f} %" if c.gib else "ran out"
    step_ms = f.step.total_ms if f.step else float("nan")
    return (
        f"{c.row['file'][:16]:16s} {c.row['model'][:30]:30s} {c.way:5s} n{e.nproc_per_node} b{e.micro_batch}"
        f" s{c.variant.sequence_length} z{e.zero_stage} {c.kind:9s} measured {c.gib or float('nan'):6.2f} forecast {gib:6.2f}"
        f" {error} | P {m.parameters_gib:.2f} G {m.gradients_gib:.2f} S {m.optimizer_states_gib:.2f} A {m.activations_gib:.2f}"
        f" | {c.row['step_time_ms'] or 0:.0f} ms, forecast {step_ms:.0f} | fits {f.fit_probability}"
    )


def table(results: list[tuple[Case, float, Any]], left: Counter[tuple[str, str]]) -> str:
    """The results as Markdown."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for c, gib, _ in results:
        if c.gib:
            groups[c.row["file"], c.way, c.kind].append(100 * (gib / c.gib - 1))
    lines = [
        "# Peaks of memory",
        "",
        "Made by `python -m benchmarks.memory`; errors in per cent of the measured peak.",
        "",
    ]
    lines += ["| file | way | memory | n | mean | median | bias | within 8 % |", "|---|---|---|--:|--:|--:|--:|--:|"]
    every = {**groups, ("all", "", ""): [e for errors in groups.values() for e in errors]}
    for (file, way, kind), errors in every.items():
        e = np.array(errors)
        if len(e):
            lines.append(
                f"| {file} | {way} | {kind} | {len(e)} | {np.abs(e).mean():.1f} | {np.median(np.abs(e)):.1f} | {e.mean():+.1f} |"
                f" {100 * (np.abs(e) <= 8).mean():.0f} % |"
            )
    lines += ["", "Not forecast:", "", "| file | reason | rows |", "|---|---|--:|"]
    lines += [f"| {file} | {reason} | {n} |" for (file, reason), n in left.most_common()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(
            Path(sys.argv[1] if len(sys.argv) > 1 else "../shared/data"),
            Path(sys.argv[2] if len(sys.argv) > 2 else made),
        )
