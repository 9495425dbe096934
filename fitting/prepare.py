"""The named collections of ../shared/data, in the columns that ``trainpace validate`` reads of any
table.

    python -m fitting.prepare --data ../shared/data --output out/prepared

What a collection leaves to its readers (which batch it states, which kernels its software had, what
its memory counts) is written into those columns, and models that it names by their sizes alone
become configurations beside the table.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from msgspec.structs import replace

from fitting.gpt_sizes import GptSize, named_model, write_configuration
from fitting.image_networks import image_network
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import find_device
from trainpace.core.records import to_jsonable
from trainpace.forecast import Case, MeasuredRun, case_of, measured_ms, read_parallelism, read_runs

FILES = ("measured_runs.parquet", "timm_inference.parquet", "runs2.parquet")
CONFIGURATIONS = "configurations"
MEGATRON_LENGTH = 2048
TORCHTITAN_LENGTH = 8192


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--output", type=Path, default=Path("out/prepared"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        runs = [
            prepared(run, options.data, options.output / CONFIGURATIONS)
            for run in read_runs(options.data / name)
        ]
        rows = [
            {key: run[key] for key in MeasuredRun.__struct_fields__ if key != "index"}
            for run in map(to_jsonable, runs)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), options.output / name)
        print(f"{len(rows)} runs in {options.output / name}")


def prepared_case(run: MeasuredRun, data: Path, configurations: Path) -> Case:
    """The case of a run as its collection states it.

    Raises `TrainpaceError` for one that cannot be forecast.
    """
    return case_of(prepared(run, data, configurations), data)


def prepared(run: MeasuredRun, data: Path, configurations: Path) -> MeasuredRun:
    """`run` with the columns that its collection implies; unchanged where its sizes make no sense,
    which its forecast says.

    `data` is where ``transformers:FILE.json`` lies, `configurations` where those of models known by
    their sizes are written.
    """
    run = replace(run, model_spec=_spec(run))
    try:
        stated = read_parallelism(run.parallelism)
        named = None
        if not run.model_spec:
            length = int(run.seq_len or MEGATRON_LENGTH)
            named = named_model(run.model, run.model_variant_or_config, length, stated.pp)
    except TrainpaceError:
        return run
    size = named.size if named else None
    columns: dict[str, Any] = _software(run) | {
        "global_batch": _global_batch(run),
        "host": run.host or host_of(run),
    }
    assumed: list[str] = []
    if named:
        columns["model_spec"] = write_configuration(named, configurations.resolve())
    columns |= _nodes(run)
    _batches(run, stated, columns, assumed)
    words = _parallelism(run, stated, size, assumed)
    columns["parallelism"] = ",".join(words)
    if run.file == "torchtitan" and not run.seq_len and "llama-3" in run.model_spec:
        columns["seq_len"] = float(
            TORCHTITAN_LENGTH
        )  # the default of its Llama 3 configurations, which its tables leave out
        assumed.append(f"{TORCHTITAN_LENGTH} tokens a sample")
    if named and named.assumed:
        assumed.append(named.assumed)
    run = replace(run, **columns, assumed=", ".join(assumed))
    return (
        replace(run, step_time_ms=_step_of_rate(run, size, data))
        if size and not run.step_time_ms
        else run
    )


def _spec(run: MeasuredRun) -> str:
    """The spec that a run states, or that its collection's name for the model stands for; none for
    torchao's 8- and 4-bit optimizers, whose kernels no trace holds.
    """
    if run.file == "torchao_tables" and not run.optimizer.startswith("PyTorch"):
        return ""
    return run.model_spec or image_network(run)


def _software(run: MeasuredRun) -> dict[str, Any]:
    """The columns that follow from a run's framework, and from what its collection says of it.

    NVIDIA's examples: their BERT writes its attention out under any torch (BERT/modeling.py),
    reduces one flat gradient after the backward pass, and its "AMP" is apex level O2, which is fp16
    throughout with fp32 master weights; their image networks have cuDNN try convolutions
    (ConvNets/main.py, Detection/SSD/main.py). llm-foundry's tables are of 2023, with
    FlashAttention's first version or Triton's of the same time.
    """
    columns: dict[str, Any] = {}
    if _is_nemo(run) or _is_megatron(run):
        # their kernels join bias and GELU, bias, dropout and addition, scale, mask and softmax, as
        # torch.compile would (Narayanan et al. 2021, section 4.2)
        columns |= {
            "compile": "compile",
            "engine": "megatron_core" if _is_nemo(run) else "unoverlapped",
        }
    if _is_nemo(run):
        # Megatron-Core updates with Transformer Engine's FusedAdam (core/optimizer/__init__.py)
        columns |= {
            "attention": "native",
            "optimizer_implementation": run.optimizer_implementation or "fused",
        }
    if _is_megatron(run):
        columns |= {"framework_version": _torch_of_megatron(run), "attention": "flash2"}
    if run.file == "mosaic_llm_foundry":
        columns["attention"] = "flash1"
    if "DeepLearningExamples" in run.framework:
        if run.model_spec.startswith("transformers:"):
            columns |= {"engine": "unoverlapped", "attention": "eager"}
            columns |= {"precision": "fp16"} if run.precision == "amp_fp16" else {}
        else:
            columns["cudnn_benchmark"] = "yes"
    if "DeepLearningExamples" in run.framework or "nvidia-smi" in run.notes:
        columns["peak_memory_kind"] = "device"
    elif run.file == "torchtitan":
        columns["peak_memory_kind"] = "reserved"
    if re.search(r"\bH2D copy\b|\bhost feed\b", run.notes):
        columns["host_copy"] = "yes"
    if run.precision == "fp8" and "rowwise" in run.notes:
        columns["precision"] = "fp8_rowwise"
    if run.precision == "bf16" and _is_before_bf16_optimizer(run):
        columns["precision"] = "fp16"
    if "timm" in run.framework and run.optimizer.lower() == "sgd":
        columns["optimizer"] = "sgd momentum"
    return columns | _software_of_collection(run)


def _software_of_collection(run: MeasuredRun) -> dict[str, Any]:
    """The columns that follow from what a collection's own scripts and pages say of its software.

    languini: attention in products, mask and softmax (projects/gpt/lib.py, use_flash=False),
    torch.compile, hence torch 2.0 or
    2.1, the versions of 2023; the loss is called on what the compiled model returns
    (train_lib/lm_trainer.py). torchao (torchao/optim/README.md): "PyTorch 2.4, BF16 AMP, compiled
    model". fms-acceleration (scripts/benchmarks/defaults.yaml): use_flash_attn,
    gradient_checkpointing. NGC's containers: NVIDIA's support matrix.
    """
    if run.file == "languini_throughput":
        return {
            "attention": "eager",
            "cross_entropy": "uncompiled",
            "framework_version": "torch 2.1.2",
        }
    if run.file == "torchao_tables" and "BF16 autocast" in run.notes:
        fused = {"optimizer_implementation": "fused"} if "fused" in run.optimizer else {}
        return {
            "precision": "amp_bf16",
            "compile": "compile",
            "framework_version": "torch 2.4",
        } | fused
    if run.file == "fms_acceleration":
        return {"attention": "flash2"}
    if (
        run.file == "nemo_automodel" and "kernels TE" in run.notes
    ):  # Transformer Engine's norms, activations and attention
        return {"compile": "compile", "attention": "native"}
    container = re.fullmatch(r"NGC pytorch:(\d\d\.\d\d)", run.framework_version)
    if container and container[1] in NGC_TORCH:
        return {"framework_version": NGC_TORCH[container[1]]} | (
            {"cudnn_benchmark": "yes"} if image_network(run) else {}
        )
    return {}


NGC_TORCH = {"20.12": "1.8.0a0", "21.03": "1.9.0a0"}
"""torch in NVIDIA's containers of the measured image networks."""
GPUS_OF_A_DGX_A100 = 8


def _nodes(run: MeasuredRun) -> dict[str, Any]:
    """The nodes of NVIDIA's image networks on 16 to 64 GPUs, whose table has them in one: they are
    DGX A100 ("8x A100 80GB").

    Their DDP also exchanges the gradients of every micro-batch (image_classification/training.py
    has no no_sync), which no column can say: forecasts exchange once a step.
    """
    gpus = run.num_gpus or 1
    if (
        run.file == "megatron_bridge" and not run.num_nodes
    ):  # trays of four GB200 or GB300, else HGX boards of eight
        return {"num_nodes": max(1.0, gpus // (4 if run.gpu.startswith("GB") else 8))}
    if image_network(run) and gpus > GPUS_OF_A_DGX_A100 and "(8x A100" in run.notes:
        return {"num_nodes": gpus / GPUS_OF_A_DGX_A100}
    return {}


HOSTS = {
    # AWS instances, one kind a card (PROFET, Lee et al. 2023, table 1): p2, p3, g3s, g4dn; A10G
    # cards are in AWS' g5 alone
    "profet_aws": {
        "K80": "Xeon E5-2686 v4",
        "M60": "Xeon E5-2686 v4",
        "V100": "Xeon E5-2686 v4",
        "T4": "Xeon Platinum 8259CL",
    },
    "litgpt_flashattn_misc": {"A10G": "EPYC 7R32"},
    # DGX-1, DGX A100, DGX H100 and their Grace successors (NVIDIA's datasheets); Selene is of DGX
    # A100
    "nvidia_deeplearningexamples": {
        "DGX-1": "Xeon E5-2698 v4",
        "DGX-2": "Xeon Platinum 8168",
        "DGX A100": "EPYC 7742",
    },
    "megatron_papers_nemo": {
        "DGX-2": "Xeon Platinum 8168",
        "A100": "EPYC 7742",
        "H100": "Xeon Platinum 8480+",
    },
    "megatron_bridge": {
        "GB200": "Grace",
        "GB300": "Grace",
        "H100": "Xeon Platinum 8480+",
        "B200": "Xeon Platinum 8570",
        "B300": "Xeon 6776P",
    },
    "nemo_automodel": {"DGX-H100": "Xeon Platinum 8480+"},
    "wan_megatron_bridge": {
        "GB200": "Grace",
        "GB300": "Grace",
        "H100": "Xeon Platinum 8480+",
        "B200": "Xeon Platinum 8570",
    },
    # Jean Zay (idris.fr): the A100 and the V100 partition
    "bigscience_bloom": {"A100": "EPYC 7543", "V100": "Xeon Gold 6248"},
    "sailor_sosp25": {"GH-96": "Grace"},
    "maxtext_gpu": {"A3": "Xeon Platinum 8481C"},
}
"""The CPU of a collection's machines by a word in the name of the card, or in the notes; the first that is found counts."""


def host_of(run: MeasuredRun) -> str:
    """The CPU of the machine that a run was measured on, where its collection's source tells; else nothing."""
    words = f"{run.gpu} {run.gpu_canonical} {run.notes}"
    return next(
        (
            cpu
            for word, cpu in HOSTS.get(run.file, {}).items()
            if re.search(rf"(?<!\w){word}(?!\d)", words)
        ),
        "",
    )


def _is_nemo(run: MeasuredRun) -> bool:
    """Megatron-Core as NVIDIA's recipes run it, in NeMo or Megatron-Bridge; NeMo's AutoModel is torch's own FSDP."""
    return bool(re.search(r"NeMo(?! AutoModel)|Megatron-Bridge", run.framework))


def _is_megatron(run: MeasuredRun) -> bool:
    """Megatron-LM and Megatron-DeepSpeed of 2020 to 2022; NeMo's is another generation."""
    year = re.match(r"(\d{4})\b", run.framework_version)
    return (
        "Megatron" in run.framework and not _is_nemo(run) and (year is None or int(year[1]) <= 2022)
    )


def _is_before_bf16_optimizer(run: MeasuredRun) -> bool:
    """BLOOM's trials kept 16-bit gradients, as in fp16, until DeepSpeed's BF16 optimizer was used
    from 28 February 2022 on (chronicles-prequel.md, "Rebalancing layers").
    """
    day = re.search(r"\brow date 02-(\d+)", run.notes)
    return run.file == "bigscience_bloom" and day is not None and int(day[1]) < 28


def _torch_of_megatron(run: MeasuredRun) -> str:
    """A torch version for papers that state a year; on cards from before Ampere theirs launched as slowly as it did then."""
    try:
        capability = find_device(run.gpu_canonical or run.gpu).compute_capability
    except TrainpaceError:
        return run.framework_version
    return "torch 1.9" if re.match(r"[1-7]\.", capability) else "torch 1.12"


def _global_batch(run: MeasuredRun) -> float | None:
    """The batch of the configuration ("GBS=512"), which goes before the table's column."""
    own = re.search(r"\bGBS=(\d+)", run.model_variant_or_config)
    return float(own[1]) if own else run.global_batch


def _batches(
    run: MeasuredRun, stated: Execution, columns: dict[str, Any], assumed: list[str]
) -> None:
    """torchtitan states a rank's whole batch, which its pipelines cut into as many micro-batches as
    there are stages; NeuSight's rows on 4 GPUs state the global batch.
    """
    batch, pp = run.batch_per_gpu, stated.pp
    if (
        run.file == "nemo_automodel" and run.global_batch
    ):  # its pipelines cut a rank's batch, which its accumulation counts once
        columns["grad_accum"] = None
    if _is_neusight(run) and (run.num_gpus or 1) > 1:
        whole = columns["global_batch"] or batch or 0
        pieces = pp if pp > 1 and whole % pp == 0 else 1
        parts = int(run.num_gpus or 1) // (stated.tp * stated.pp * stated.cp) * pieces
        columns |= {"global_batch": whole, "grad_accum": float(pieces)}
        columns["batch_per_gpu"] = whole // parts if parts and whole % parts == 0 else None
    elif run.file == "torchtitan" and pp > 1 and batch and batch % pp == 0:
        pieces = pp
        columns |= {"batch_per_gpu": batch // pp, "grad_accum": float(pp)}
    else:
        return
    if pieces > 1:
        assumed.append(f"{pieces} micro-batches")


def _is_neusight(run: MeasuredRun) -> bool:
    return run.file.startswith("neusight")


def _parallelism(
    run: MeasuredRun, stated: Execution, size: GptSize | None, assumed: list[str]
) -> list[str]:
    """The words of the column `parallelism`.

    torchtitan's tensor parallelism shards norms by the sequence, and so do NeMo's configurations.
    Megatron-LM hides tensor exchanges under a weight's gradient since the end of 2021 (Korthikanti
    et al. 2022, section 4.2.2), and so does NeMo.
    """
    # fms-acceleration and fms-fsdp write FSDP in words of their own
    text = re.sub(r"^FSDP (?:full shard )?x(\d+)", r"fsdp=\1", run.parallelism)
    text = re.sub(r"^HSDP x\d+", "fsdp=HYBRID_SHARD", text)
    layers_a_stage = re.search(r"vp_layers=(\d+)", text)
    if layers_a_stage and size:
        stages = max(1, size.layers // (stated.pp * int(layers_a_stage[1])))
        text = text.replace(layers_a_stage[0], f"vp={stages}")
    words = [text] if text else []
    # AutoModel's benchmarks of experts (examples/benchmark/configs/*_te_deepep.yaml) set
    # activation_checkpointing
    said = "checkpointing on" in run.notes if run.file == "fms_acceleration" else False
    said |= run.file == "nemo_automodel" and stated.ep > 1
    if said or (size and _counts_recomputation(run, size)):
        words.append("ac=full")
    ranks = int(run.num_gpus or 1) // (stated.tp * stated.pp * stated.cp)
    if _is_nemo(run) and not stated.zero_stage and ranks > 1:
        words.append("zero=1")
        assumed.append(
            "an optimizer distributed over the data-parallel ranks, as NeMo has by default"
        )
    if run.file == "torchtitan" or _is_nemo(run):
        words.append("sp")
    if stated.ep > 1 and (_is_nemo(run) or "DeepEP" in run.notes):
        words.append("ep_overlap" if _overlaps_experts(run) else "deepep")
        assumed += [] if "DeepEP" in run.notes else ["tokens sent by DeepEP"]
        if "balanced fake router" in run.notes:
            # AutoModel's FakeBalancedGate (components/moe/layers.py) gives a token its experts in a
            # row, which lie on one node
            words.append("expert_nodes=1")
    if _is_nemo(run) or (_is_megatron(run) and "2205.05198" in run.framework_version):
        words.append("async_tp")
    if _is_neusight(run) and stated.pp > 1:
        words.append("gpipe")
    return words


FULL_ITERATION_RELEASE = (26, 6)


def _overlaps_experts(run: MeasuredRun) -> bool:
    """Whether a recipe of Megatron-Bridge sends tokens under the computation of another micro-batch
    (moe_a2a_overlap=True).

    Its scripts/performance/configs (deepseek_workload_base_configs.py,
    gpt_oss_workload_base_configs.py): those of DeepSeek-V3 and GPT-OSS in MXFP8 do so on Blackwell
    since they capture whole iterations, which its table of results shows from the container of
    26.06 on; before it DeepSeek-V3's on B200 with two chunks a stage does. Qwen3's 30B, and Kimi K2
    with micro-batches of two, do not.
    """
    release = re.match(r"(\d\d)\.(\d\d)", run.framework_version)
    if run.file != "megatron_bridge" or release is None or "MXFP8" not in run.notes:
        return False
    if run.model == "DeepSeekV3" and run.gpu == "B200":
        return "pp=8,cp=1,vp=2" in run.parallelism
    newer = (int(release[1]), int(release[2])) >= FULL_ITERATION_RELEASE
    return newer and run.model in ("DeepSeekV3", "GPT OSS 120B")


def _counts_recomputation(run: MeasuredRun, size: GptSize) -> bool:
    """Does a run that says nothing of recomputation state a rate that counts four passes in its
    time?
    """
    if "ac=" in run.parallelism or not (
        run.step_time_ms and run.tflops_per_gpu and run.seq_len and run.num_gpus
    ):
        return False
    counted = run.tflops_per_gpu * 1e12 * run.num_gpus * run.step_time_ms / 1e3
    return abs(size.step_flops(int(_global_batch(run) or 0), int(run.seq_len)) / counted - 1) < 0.03


def _step_of_rate(run: MeasuredRun, size: GptSize, data: Path) -> float | None:
    """The step that a rate of FLOPs makes, by the formula that its source counted them with
    (`GptSize.step_flops`).
    """
    try:
        execution = case_of(run, data).execution
    except TrainpaceError:
        return None
    if measured_ms(run, execution) or not (run.tflops_per_gpu and run.seq_len):
        return None
    passes = 4 if re.search(r"recomput", run.notes) and "x 3/4" not in run.notes else 3
    flops = size.step_flops(
        int(run.global_batch or execution.global_batch), int(run.seq_len), passes
    )
    return 1e3 * flops / (run.tflops_per_gpu * 1e12 * execution.world_size)


if __name__ == "__main__":
    main()
