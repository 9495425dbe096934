"""How fast `plan` searches executions for a cluster, and whether it finds what forecasting each one by one finds.

The large case is Llama-3-70B on 512 H100: every legal execution at a constant global batch, on all nodes and on parts of the
cluster. The small cases are enumerated a second time by loops of their own, forecast one by one, and compared.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution, Precision
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import Forecaster, Target
from trainpace.job import NO_WAIT, Schedule
from trainpace.plan import Problem, SearchSpace
from trainpace.plan.evaluate import part_of
from trainpace.plan.search import executions_on, search
from trainpace.plan.settings import config_line
from trainpace.workload import Variant, Workload, load_workload

ROUNDS = 5
RESULT = Path(__file__).parent / "results" / "cluster_search.md"
JOB = Schedule(max_steps=1000)
LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
KEPT = ("GPUs", "offload", "precision", "compile")
"""Not enumerated in the small cases, so that one by one takes a minute and not an hour."""


def traced(config: Mapping[str, object], sequence_length: int) -> Workload:
    """A transformer in 16 bits under AdamW."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return load_workload(f"transformers:{path}", ("half",), Variant("adamw", sequence_length))


def large_case() -> list[str]:
    """Search time and optimum of Llama-3-70B on 512 H100."""
    workload = traced(LLAMA_70B, 8192)
    cluster = Cluster(
        device=find_device("H100"), devices_per_node=8, nodes=64, network_gb_per_s_per_device=50.0
    )
    start = Execution(
        micro_batch=1,
        accumulation=2,
        nnodes=64,
        nproc_per_node=8,
        precision="bf16",
        optimizer="adamw",
    )
    setting = Problem(workload, cluster, JOB)
    lines = [
        "| executions of Llama-3-70B, global batch 1,024 | searched | fit | seconds (median) | of one core | best |",
        "|---|---|---|---|---|---|",
    ]
    for name, space in (
        ("on all 512 H100", SearchSpace(keep=("GPUs",))),
        ("and on parts of them", SearchSpace()),
    ):
        walls, cores = [], []
        for _ in range(ROUNDS):
            wall, cpu = time.perf_counter(), time.process_time()
            found = search(
                setting, start, executions_on(cluster, workload, start, space), (NO_WAIT,)
            )
            best = found.best()
            walls.append(time.perf_counter() - wall)
            cores.append(time.process_time() - cpu)
        assert best is not None
        step_ms = found.evaluation.step_ms[best[0]]
        lines.append(
            f"| {name} | {len(found.grid):,} | {found.fitting:,} | {statistics.median(walls):.2f} |"
            f" {statistics.median(cores):.2f} | {step_ms:,.0f} ms: {config_line(found.choice(best))} |"
        )
    return lines


def one_by_one(start: Execution, blocks: int) -> Iterator[Execution]:
    """All executions with the same world and global batch that the records allow, by plain loops."""
    world, sizes = start.world_size, (1, 2, 3, 4, 6, 8, 12)
    for tp, pp, cp, virtual in product(sizes, sizes, (1, 2, 4, 8), (1, 2, 3)):
        ranks = world // (tp * pp * cp)
        if ranks * tp * pp * cp != world or start.global_batch % ranks:
            continue
        if pp * virtual > max(1, blocks) or (virtual > 1 and pp == 1):
            continue
        share = start.global_batch // ranks
        for micro in (n for n in range(1, share + 1) if share % n == 0):
            for (zero, reshards), recompute, along in product(
                ((0, True), (1, True), (2, True), (3, True), (3, False)),
                ("none", "selective", "full") if blocks else ("none",),
                (False, True) if tp > 1 else (False,),
            ):
                try:
                    yield replace(
                        start,
                        micro_batch=micro,
                        accumulation=share // micro,
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        zero_stage=zero,
                        reshard_after_forward=reshards,
                        virtual_stages=virtual,
                        pipeline_schedule="interleaved" if virtual > 1 else "1f1b",
                        activation_checkpointing=recompute,
                        sequence_parallel=along,
                    )
                except TrainpaceError:
                    continue


def small_cases() -> list[str]:
    """The search's optimum against the fastest of all executions forecast one by one."""
    gpt2 = traced(GPT2, 1024)
    cases = {
        "GPT-2, 4 H100": (gpt2, Cluster(device=find_device("H100"), devices_per_node=4), 4),
        "GPT-2, 2 x 2 T4, 1.25 GB/s": (
            gpt2,
            Cluster(
                device=find_device("T4"),
                devices_per_node=2,
                nodes=2,
                network_gb_per_s_per_device=0.625,
            ),
            2,
        ),
    }
    lines = [
        "| case | one by one: executions, seconds | best, ms a step | search: executions, seconds | best, ms a step |",
        "|---|---|---|---|---|",
    ]
    for name, (workload, cluster, micro) in cases.items():
        precision: Precision = "bf16" if cluster.device.bf16_tensor_tflops else "fp16"
        start = Execution(
            micro_batch=micro,
            nnodes=cluster.nodes,
            nproc_per_node=cluster.devices_per_node,
            precision=precision,
            optimizer="adamw",
        )
        form = workload.form(precision)
        count = 0 if form.blocks is None else form.blocks.count
        begun, best_ms, tried = time.perf_counter(), float("inf"), 0
        forecaster = Forecaster(workload, Target(cluster))
        for execution in one_by_one(start, count):
            try:
                part = part_of(cluster, execution.nnodes, execution.nproc_per_node)
                f = forecaster.on(part).forecast(execution)
            except TrainpaceError:
                continue
            tried += 1
            if f.step is not None and f.fits:
                best_ms = min(best_ms, f.step.total_ms)
        exhaustive_s = time.perf_counter() - begun
        begun = time.perf_counter()
        grid = executions_on(cluster, workload, start, SearchSpace(keep=KEPT))
        found = search(Problem(workload, cluster, JOB), start, grid, (NO_WAIT,))
        searched_s = time.perf_counter() - begun
        # of steps, as one by one; the best of the whole job may be another, whose checkpoints are smaller
        found_ms = found.evaluation.step_ms[np.isfinite(found.job_s).any(axis=1)].min()
        lines.append(
            f"| {name} | {tried:,}, {exhaustive_s:.1f} | {best_ms:.2f} |"
            f" {len(found.grid):,}, {searched_s:.2f} | {found_ms:.2f} |"
        )
    return lines


def main() -> None:
    """Run everything and write the page."""
    where = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
    page = [
        "# Searching executions for a cluster",
        "",
        f"`python benchmarks/cluster_search.py`, {datetime.date.today()}, {where}.",
        "",
        *large_case(),
        "",
        *small_cases(),
        "",
        "The search is at least as good as one by one where its best is not slower.",
        "",
    ]
    RESULT.write_text("\n".join(page))
    print("\n".join(page))


if __name__ == "__main__":
    main()
