"""Options that say how a step is divided over devices, shared by the commands that forecast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from trainpace.cli.options import AT_LEAST_1

_OPTIONS = (
    click.option("--tp", type=AT_LEAST_1, default=1, show_default=True, help="Tensor-parallel ranks."),
    click.option("--pp", type=AT_LEAST_1, default=1, show_default=True, help="Pipeline stages; micro-batches by --accumulate."),
    click.option("--cp", type=AT_LEAST_1, default=1, show_default=True, help="Context-parallel ranks: divide the sequence."),
    click.option("--sequence-parallel", is_flag=True, help="Divide norms and residuals over the tensor-parallel ranks too."),
    click.option("--async-tp", is_flag=True, help="Hide part of tensor parallelism's exchanges under its products."),
    click.option(
        "--pipeline",
        type=click.Choice(["gpipe", "1f1b", "interleaved"]),
        default="1f1b",
        show_default=True,
        help="Schedule of the pipeline's micro-batches.",
    ),
    click.option("--virtual-stages", type=AT_LEAST_1, default=1, show_default=True, help="Stages a device, interleaved."),
    click.option(
        "--zero", type=click.IntRange(0, 3), default=0, show_default=True, help="ZeRO stage; 3 is FSDP's full sharding."
    ),
    click.option("--shard-size", type=AT_LEAST_1, help="Shard over so many data-parallel ranks only (hybrid sharding)."),
    click.option("--keep-gathered", is_flag=True, help="FSDP without resharding after the forward pass."),
    click.option(
        "--offload",
        type=click.Choice(["none", "optimizer", "parameters", "both"]),
        default="none",
        show_default=True,
        help="What is kept in the host's memory.",
    ),
    click.option(
        "--checkpointing",
        type=click.Choice(["none", "selective", "full"]),
        is_flag=False,
        flag_value="full",
        default="none",
        help="Recompute activations in the backward pass; alone it means full, block by block.",
    ),
)  # fmt: skip


def sharding_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def sharding_of(o: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Execution` that the options give. Refuses those that would do nothing."""
    for said, option, needs in (
        (o["shard_size"] is not None and o["zero"] == 0, "--shard-size", "--zero 1, 2 or 3"),
        (o["keep_gathered"] and o["zero"] != 3, "--keep-gathered", "--zero 3"),
        (o["sequence_parallel"] and o["tp"] == 1, "--sequence-parallel", "--tp of 2 or more"),
        (o["async_tp"] and o["tp"] == 1, "--async-tp", "--tp of 2 or more"),
    ):
        if said:
            raise click.UsageError(f"{option} does nothing without {needs}.")
    return {
        "tp": o["tp"], "pp": o["pp"], "cp": o["cp"], "sequence_parallel": o["sequence_parallel"],
        "async_tensor_parallel": o["async_tp"], "pipeline_schedule": o["pipeline"], "virtual_stages": o["virtual_stages"],
        "zero_stage": o["zero"], "shard_size": o["shard_size"], "reshard_after_forward": not o["keep_gathered"],
        "offload_optimizer": o["offload"] in ("optimizer", "both"), "offload_parameters": o["offload"] in ("parameters", "both"),
        "activation_checkpointing": o["checkpointing"],
    }  # fmt: skip
