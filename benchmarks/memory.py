"""Peaks of memory beside those that others measured: by file and way of training, into benchmarks/results/memory.md.

    python -m benchmarks.memory ../shared/data [FOLDER]

FOLDER keeps the traces for another run. Nothing is fitted on these rows but the spread of the probability to fit, which is shown
on those that it was not fitted on. Configurations of models are their published ones. fms-acceleration's runs are traced with the
transformers and peft that they ran (`make .fms/installed`; its scripts/benchmarks/refs/requirements.txt): code of today makes
other copies of the logits. A row that cannot be forecast is counted by its reason.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import md5
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from fitting.prepare import prepared_case
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution, Form
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.records import load
from trainpace.core.software import Software
from trainpace.core.units import BYTES_PER_GIB
from trainpace.forecast import Forecaster, Target, needed_gib, read_runs, usable_gib
from trainpace.forecast.memory import COMPILED_NEED_SD, NEED_SD, fit_probability
from trainpace.workload import Adaptation, Variant, Workload, form_of, trace_many

OLD_PACKAGES = ".fms"
RESULT = Path(__file__).parent / "results" / "memory.md"


def _llama(
    hidden: int, wide: int, layers: int, heads: int, keys: int, words: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": words,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        **more,
    }


_QWEN = {"model_type": "qwen2", "tie_word_embeddings": False}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bigcode/gpt_bigcode-santacoder": {
        "model_type": "gpt_bigcode",
        "n_embd": 2048,
        "n_head": 16,
        "n_layer": 24,
        "n_inner": 8192,
        "n_positions": 2048,
        "vocab_size": 49280,
        "multi_query": True,
    },
    "ibm/PowerLM-3b": _llama(2304, 9216, 40, 36, 36, 49152, tie_word_embeddings=True),
    "mistralai/Mistral-7B-v0.1": _llama(4096, 14336, 32, 32, 8, 32000),
    "meta-llama/Llama-3.2-3B": _llama(
        3072, 8192, 28, 24, 8, 128256, head_dim=128, tie_word_embeddings=True
    ),
    "Qwen-1.8B": _llama(2048, 5504, 24, 16, 16, 151936, **_QWEN),
    "Qwen-7B": _llama(4096, 11008, 32, 32, 32, 151936, **_QWEN),
    "Qwen-14B": _llama(5120, 13696, 40, 40, 40, 152064, **_QWEN),
    "Qwen-72B": _llama(8192, 24576, 80, 64, 64, 152064, **_QWEN),
    "Llama-2-70B": _llama(8192, 28672, 80, 64, 8, 32000),
    "Mixtral-8x7B": _llama(
        4096,
        14336,
        32,
        32,
        8,
        32000,
        model_type="mixtral",
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_theta=1e6,
    ),
    "Llama2-7B": _llama(4096, 11008, 32, 32, 32, 32000),
    "Llama3-8B": _llama(4096, 14336, 32, 32, 8, 128256),
}
"""Published configurations. Qwen's first generation is Qwen2's with as many keys as queries."""
OPTIMIZERS = {
    "bnb 8-bit": "adamw_8bit",
    "ao 8-bit": "adamw_torch_8bit",
    "ao FP8 E4M3": "adamw_torch_8bit",
    "ao 4-bit": "adamw_torch_4bit",
    "lpmm 4-bit": "adamw_torch_4bit",
    "lpmm 4-bit rank-1": "adamw_torch_4bit",
}
"""By torchao's table; what it calls lpmm has states of 4 bits with a scale for 128 of them, as torchao's own."""
_NAMES = (
    ("llama-2-70b", "Llama-2-70B"),
    ("mixtral-8x7b", "Mixtral-8x7B"),
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
    is_old: bool

    @property
    def trace_key(self) -> tuple[str, Form, Variant]:
        return self.spec, form_of(self.execution.precision), self.variant

    @property
    def packages(self) -> str:
        """The folder of the packages that the run used; empty for those of today."""
        return OLD_PACKAGES if self.is_old else ""

    def trace_file(self, traces: Path) -> str:
        return str(
            traces / f"{md5(repr((self.trace_key, self.packages)).encode()).hexdigest()}.json"
        )


def spec_of(row: dict[str, Any], folder: Path) -> str:
    """The model's spec. Raises TrainpaceError where no definition is known."""
    if row["model_spec"]:
        return str(row["model_spec"])
    name = row["model"] or ""
    known = (
        name
        if name in CONFIGURATIONS
        else next((k for word, k in _NAMES if word in name.casefold()), None)
    )
    if known is None:
        raise TrainpaceError("no definition of the model")
    path = folder / (known.replace("/", "_") + ".json")
    path.write_text(json.dumps(CONFIGURATIONS[known]))
    return f"transformers:{path}"


def adaptation_of(text: str, sharded: bool) -> tuple[Adaptation, str]:
    """How a run was adapted, and the way in a word."""
    lower = text.casefold()
    gptq = "gptq" in lower or "q-lora" in lower  # Qwen's
    if "lora" not in lower:
        return Adaptation(), "full"
    quantised = "bnb" in lower or "qlora" in lower
    rank = re.search(r"r=(\d+)", lower)
    targets = re.search(r"targets=([\w ]+)", text)
    names = ",".join(targets[1].split()) if targets else "all-linear"
    how = Adaptation(
        "lora", int(rank[1]) if rank else 16, names, weights="nf4_double" if quantised else ""
    )
    # trl casts norms to fp32 where the weights are on the GPU; fms-acceleration's own plugin, and sharded weights, cast nothing
    how = how._replace(fp32_weights="norms" if "baseline" in lower and not sharded else "none")
    if gptq:
        return how._replace(weights="gptq"), "GPTQ-LoRA"
    if "(emb)" in lower:
        how = how._replace(whole="embed_tokens,lm_head")
    return how, "QLoRA" if quantised else "LoRA"


def case_of(row: dict[str, Any], folder: Path) -> Case:
    """The case of a row. Raises TrainpaceError with the reason why it cannot be forecast."""
    text = f"{row['model_variant_or_config'] or ''}"
    if re.search(r"moe-|ep\d|8x2b", f"{text} {row['model']}".casefold()):
        raise TrainpaceError("experts without a definition")
    has_experts = "mixtral" in (row["model"] or "").casefold()
    is_old = row["file"] == "fms_acceleration" and not has_experts
    if has_experts and ("bnb" in text or "gptq" in text):
        raise TrainpaceError("experts that are packed one by one")
    kind = (row["mem_kind"] or "").casefold()
    gib = row["peak_mem_gib"]
    if gib is None and not row["oom"]:
        raise TrainpaceError("no peak")
    image = bool(row["img_size"])
    if not row["gpu_canonical"]:
        raise TrainpaceError("no GPU")
    if not row["batch_per_gpu"] or not (row["seq_len"] or image):
        raise TrainpaceError("no batch or length")
    fsdp = "FSDP" in (row["parallelism"] or "")
    how, way = adaptation_of(text, fsdp)
    if how.adapter and "gpt_bigcode" in (row["model"] or ""):
        how = how._replace(targets="c_attn")
    elif how.targets != "all-linear":
        how = how._replace(
            targets=",".join(name for name in how.targets.split(",") if name != "c_attn")
        )
    gpus = int(row["num_gpus"] or 1)
    zero = re.search(r"ZeRO.?(\d)", row["parallelism"] or "", re.IGNORECASE)
    if zero is None and "zero" in text.casefold():
        zero = re.search(r"zero.?(\d)", text, re.IGNORECASE)
    length = int(row["seq_len"]) if row["seq_len"] else None
    recomputes = "checkpointing on" in (row["notes"] or "") or "gradient checkpointing" in text
    # with packages of its time the model's own switch is taken: what it keeps besides is that code's
    own = recomputes and is_old
    optimizer = OPTIMIZERS.get(
        row["optimizer"] or "", "sgd_momentum" if "SGD" in (row["optimizer"] or "") else "adamw"
    )
    implementation = "fused" if "fused" in (row["optimizer"] or "").casefold() else None
    if gib is not None and re.search(r"GB.*1e9", row["mem_kind"] or ""):
        gib = gib * 1e9 / BYTES_PER_GIB
    precision = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}.get(row["precision"] or "", "bf16")
    if "autocast" in (row["notes"] or "").casefold():
        precision = "amp_bf16"
    execution = Execution(
        micro_batch=int(row["batch_per_gpu"]),
        accumulation=int(row["grad_accum"] or 1),
        precision=precision,  # type: ignore[arg-type]
        nproc_per_node=gpus,
        zero_stage=3 if fsdp else int(zero[1]) if zero else 0,  # type: ignore[arg-type]
        activation_checkpointing="full" if recomputes and not own else "none",
        optimizer=optimizer,
        compile=row["compile"] == "compile",
        pure_16_bit=row["file"] == "fms_acceleration",
    )
    variant = Variant(
        optimizer,
        length,
        int(row["img_size"]) if image else None,
        checkpointing=own,
        adaptation=how,
    )
    # Unsloth's kernel takes what the model's code gives it: logits in fp32 from Llama's, in bf16 from gpt_bigcode's
    fused = (
        None
        if "foak" not in text
        else "fused"
        if "bigcode" in (row["model"] or "")
        else "fused_fp32"
    )
    cluster = Cluster(device=find_device(row["gpu_canonical"]), devices_per_node=gpus)
    peak = "allocated" if "allocated" in kind else "reserved" if "reserved" in kind else "device"
    software = Software(cross_entropy=fused, optimizer=implementation)  # type: ignore[arg-type]
    return Case(
        row, spec_of(row, folder), variant, execution, cluster, software, gib, peak, way, is_old
    )


def forecast_gib(case: Case, workload: Workload) -> tuple[float, Any]:
    """(the forecast peak in the row's own kind of memory, the whole forecast)."""
    forecast = Forecaster(workload, Target(case.cluster, software=case.software)).forecast(
        case.execution
    )
    m = forecast.memory
    assert m is not None, "one rank's memory is always forecast"
    return {"allocated": m.allocated_gib, "reserved": m.reserved_gib, "device": m.device_gib}[
        case.kind
    ], forecast


@contextlib.contextmanager
def packages_of(folder: str) -> Iterator[None]:
    """Let the processes that trace find the packages of a folder before all others."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


@cache
def _loaded(file: str) -> Workload:
    return load(file, Workload)


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
    reasons: dict[str, str] = {}
    for packages in ("", OLD_PACKAGES):
        wanted = {c.trace_file(traces): c.trace_key for c in cases if c.packages == packages}
        with packages_of(packages):
            reasons |= trace_many(
                {file: key for file, key in wanted.items() if not Path(file).is_file()}
            )
        print(f"{len(wanted)} traces with {packages or 'the packages of today'}", file=sys.stderr)
    results = []
    for c in cases:
        file = c.trace_file(traces)
        if file in reasons:
            left[c.row["file"], reasons[file][:100]] += 1
            continue
        try:
            results.append((c, *forecast_gib(c, _loaded(file))))
        except TrainpaceError as error:
            left[c.row["file"], str(error)[:100]] += 1
    for c, gib, f in results:
        print(line_of(c, gib, f), file=sys.stderr)
    fits = languini_fits(data, traces)
    for c, gib, f in results:
        off = None if c.gib is None else float(np.log(c.gib / gib))
        ended = fit_of(c.row["model"], c.execution.compile, c.gib is not None, f, c.cluster)
        fits.append(ended._replace(error=off))
    RESULT.write_text(table(results, left) + fit_table(fits))
    print(RESULT.read_text())


class Fit(NamedTuple):
    """A run that fitted its card or did not. distance: log(room / memory needed), forecast; probability: forecast; error:
    log(measured / forecast) of its peak, None where none is known."""

    model: str
    compiles: bool
    ran: bool
    distance: float
    probability: float
    error: float | None = None


def fit_of(
    model: str, compiles: bool, ran: bool, forecast: Any, cluster: Cluster, more_gib: float = 0.0
) -> Fit:
    """more_gib: what the run's script is known to hold besides."""
    capacity, memory = cluster.device.memory_gib, forecast.memory
    assert capacity is not None, "the card's memory is known"
    parts = ("parameters_gib", "reserved_gib", "device_gib")
    memory = replace(memory, **{name: getattr(memory, name) + more_gib for name in parts})
    distance = float(np.log(usable_gib(capacity.value) / needed_gib(memory)))
    return Fit(
        model, compiles, ran, distance, float(fit_probability(memory, capacity.value, compiles))
    )


def languini_fits(data: Path, traces: Path) -> list[Fit]:
    """Languini's GPTs, whose batches grow until they run out of memory.

    What their script holds besides is in it (languini/common_lib/throughput_utils.py) and in the rows: each block has a causal
    mask of 64 MiB, which the configuration that stands for it has not; the logits in 16 bits are a variable while the
    backward pass runs; and the gradients of the step before are alive until the forward pass has ended, when two of the three
    tensors of the logits' size in fp32 are not there yet.
    """
    cases, loaded_gib = [], {}
    for run in read_runs(data / "measured_runs.parquet"):
        if run.file == "languini_throughput":
            if said := re.search(r"model_mem_MiB=([\d.]+)", run.notes):
                loaded_gib[run.model] = float(said[1]) / 1024
            with contextlib.suppress(TrainpaceError):
                cases.append((run, prepared_case(run, data, traces)))
    keys = {
        case.trace_key: str(traces / f"{md5(repr(case.trace_key).encode()).hexdigest()}.json")
        for _, case in cases
    }
    reasons = trace_many({file: key for key, file in keys.items() if not Path(file).is_file()})
    fits = []
    for run, case in cases:
        if keys[case.trace_key] not in reasons:
            target = Target(case.cluster, software=case.software)
            forecast = Forecaster(_loaded(keys[case.trace_key]), target).forecast(case.execution)
            ran = run.step_time_ms is not None
            weights_gib = forecast.memory.parameters_gib  # type: ignore[union-attr]
            logits_gib = 4 * 16384 * 512 * case.execution.micro_batch / BYTES_PER_GIB
            more_gib = (
                loaded_gib[run.model]
                - weights_gib
                + logits_gib / 2
                + max(weights_gib - 2 * logits_gib, 0.0)
            )
            fits.append(
                fit_of(
                    Path(case.spec).stem,
                    case.execution.compile,
                    ran,
                    forecast,
                    case.cluster,
                    more_gib,
                )
            )
    return fits


def spread_of(fits: Sequence[Fit]) -> float:
    """The standard deviation of log(needed / forecast) under which measured peaks, and what ran and what did not, are the
    likeliest."""
    distance, ran = (
        np.array([(f.distance, f.ran) for f in fits if f.error is None], dtype=float)
        .reshape(-1, 2)
        .T
    )
    errors = np.array([f.error for f in fits if f.error is not None])

    def surprise(sd: float) -> float:
        probability = np.array([NormalDist().cdf(d / sd) for d in distance])
        ends = -np.log(np.maximum(np.where(ran > 0, probability, 1 - probability), 1e-9)).sum()
        return float(ends + (errors**2 / (2 * sd**2) + np.log(sd)).sum())

    return float(min(np.geomspace(0.01, 1.0, 400), key=surprise))


def fit_table(fits: Sequence[Fit]) -> str:
    """The spread on half of the models, and how often runs of the other half fitted, by the probability that was forecast."""
    models = sorted({f.model for f in fits})
    fitted_on, shown = set(models[::2]), models[1::2]
    lines = [
        "",
        "## Fits or not",
        "",
        "Languini's GPTs on RTX 3090, A100 and P100, batches up to those that ran out of memory, with what their script is known"
        " to hold besides, and all runs of the table above and those that ran out beside them. The spread of the probability is"
        f" fitted on every second model by name ({', '.join(models[::2])}) and shown on the others ({', '.join(shown)}).",
        "",
        "| | runs of the fit | peaks among them | spread | spread shipped | spread on the others |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, compiles, shipped in (
        ("eager", False, NEED_SD),
        ("torch.compile", True, COMPILED_NEED_SD),
    ):
        some, rest = (
            [f for f in fits if f.compiles == compiles and (f.model in fitted_on) == inside]
            for inside in (True, False)
        )
        peaks = sum(f.error is not None for f in some)
        lines.append(
            f"| {name} | {len(some)} | {peaks} | {spread_of(some):.3f} | {shipped:.3f} | {spread_of(rest):.3f} |"
        )
    others = [f for f in fits if f.model in shown]
    lines += [
        "",
        "Runs of the other models:",
        "",
        "| forecast probability | runs | forecast | fitted |",
        "|---|--:|--:|--:|",
    ]
    for low, high in pairwise((0.0, 0.05, 0.2, 0.5, 0.8, 0.95, 1.0 + 1e-9)):
        some = [f for f in others if low <= f.probability < high]
        if some:
            ran, p = np.array([(f.ran, f.probability) for f in some], dtype=float).T
            lines.append(
                f"| {low:.2f} to {min(high, 1):.2f} | {len(some)} | {100 * p.mean():.0f} % | {100 * ran.mean():.0f} % |"
            )
    lines += [
        "",
        "Fits or not is right:",
        "",
        "| | fitted on | right | others | right |",
        "|---|--:|--:|--:|--:|",
    ]
    close = np.log(1 / 0.85)
    for name, wanted in (
        ("all", lambda f: True),
        ("eager", lambda f: not f.compiles),
        ("torch.compile", lambda f: f.compiles),
        ("ran out", lambda f: not f.ran),
        ("forecast at 85 to 118 % of the card", lambda f: abs(f.distance) < close),
    ):
        cells = []
        for half in ([f for f in fits if f.model in fitted_on], others):
            rows = [f for f in half if wanted(f)]
            right = [f.ran == (f.distance >= 0) for f in rows]
            cells += [str(len(rows)), f"{100 * np.mean(right):.0f} %" if rows else ""]
        lines.append(f"| {name} | {' | '.join(cells)} |")
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
    lines += [
        "| file | way | memory | n | mean | median | bias | within 8 % |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
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
